"""Mount namespaces: what makes a process of this machine one that does not see another's folders."""

import subprocess


def may_unshare():
    """Return whether this user may make mount namespaces; Linux's root may, most others may not."""
    tried = [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "mount",
        "-t",
        "tmpfs",
        "none",
        "/mnt",
    ]
    try:
        return subprocess.run(tried, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False
