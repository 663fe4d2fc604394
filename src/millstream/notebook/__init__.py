"""What an app in a notebook needs of the notebook: which cell runs, and displays that follow what they show.

Nothing here imports IPython: where a cell runs, it is loaded. Elsewhere every function says that there is no notebook.
"""
