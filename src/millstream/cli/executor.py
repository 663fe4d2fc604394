"""``millstream executor``: what a pod of Spark's runs, where the image's entry point is ``millstream``."""

from __future__ import annotations

import os

import click


@click.command()
def executor() -> None:
    """Become an executor of Spark's, in a pod that Spark on Kubernetes has created.

    Spark starts it, by the entry point of the image; the environment says which driver it belongs to.
    """
    from millstream.spark.runtime.java import find_java
    from millstream.spark.runtime.kubernetes_executor import executor_command

    command = executor_command(os.environ, find_java(os.environ))
    os.execv(command[0], command)  # noqa: S606 - this process is the pod's: signals must reach the JVM
