"""Alerts that are told without Prometheus: rules over the same metrics, and by what they are told.

`rule.py` has the rules, `state.py` what is kept of each between two looks (the crash table is there), `targets.py`
by what an alert is told, `sender.py` bounds how long that takes, `watch.py` puts them together, `rules_file.py` reads the file of an operator.
"""
