"""Pipelines as declared: App, Topic, Stream, and their plan.

A pipeline is declared with :class:`~millstream.pipeline.app.App`, checked while it is declared,
compiled into a plan (:mod:`millstream.pipeline.compiler`) and run on Spark, or in process by
:mod:`millstream.testing`. The public names are listed in :mod:`millstream` alone.
"""
