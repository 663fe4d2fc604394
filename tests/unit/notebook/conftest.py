"""A shell of IPython's in this process, which runs cells as a kernel would."""

import pytest


class Cells:
    """Runs cells, known by an id as a front end gives it; the shell shows nothing."""

    def __init__(self, shell):
        self.shell = shell

    def run(self, code, cell=None):
        """Run a cell; return the error that it ended with, or None."""
        done = self.shell.run_cell(code, store_history=True, cell_id=cell)
        return done.error_in_exec or done.error_before_exec

    def value(self, name):
        return self.shell.user_ns[name]


@pytest.fixture
def cells(tmp_path, monkeypatch):
    interactive = pytest.importorskip("IPython.core.interactiveshell", reason="no IPython")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("MILLSTREAM_LOG", str(tmp_path / "log"))
    shell = interactive.InteractiveShell.instance()
    shell.history_manager.enabled = False
    yield Cells(shell)
    shell.history_manager.end_session()
    interactive.InteractiveShell.clear_instance()
