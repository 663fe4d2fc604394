"""Two processes, one folder: the owner appends, and every other process asks it to.

``gate`` is where the owner lets others in, ``guest`` the connection of one that has come,
``requests`` what can be asked, ``frames`` how that looks on the way. ``access`` is a process's
standing with a folder: owner or guest, and whichever of the two is possible when the owner dies.
``writing`` is what producers see of all this: a writer. Reading needs none of it.
"""
