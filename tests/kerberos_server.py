"""A Kerberos of the tests' own: MIT's KDC with one realm, whose files are in a folder."""

import os
import shutil
import subprocess
import threading
from contextlib import ExitStack
from pathlib import Path

from millstream.testing.free_ports import free_ports

REALM = "TEST.EXAMPLE"
HOST = "localhost"
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
_PROGRAMS = {
    "krb5kdc": "krb5-kdc",
    "kdb5_util": "krb5-kdc",
    "kadmin.local": "krb5-admin-server",
    "kinit": "krb5-user",
}


def why_not() -> str:
    """Return which program is missing, and how to get it; "" if none is."""
    missing = [each for each in _PROGRAMS if not shutil.which(each, path=_PATH)]
    packages = " ".join(sorted({_PROGRAMS[each] for each in missing}))
    return f"no {', '.join(missing)}: on Debian, apt-get install {packages}" if missing else ""


class Kdc:
    """A KDC that runs until the stack ends. ``probe`` is a file with a ticket."""

    def __init__(self, folder: Path, opened: ExitStack):
        self.folder, self.probe = folder, folder / "probe.tickets"
        folder.mkdir()
        (port,) = free_ports(1)
        self.config = folder / "krb5.conf"
        self.config.write_text(
            f"[libdefaults]\n default_realm = {REALM}\n dns_lookup_kdc = false\n rdns = false\n"
            " dns_canonicalize_hostname = false\n udp_preference_limit = 1\n"
            f"[realms]\n {REALM} = {{\n  kdc = 127.0.0.1:{port}\n }}\n"
            f"[domain_realm]\n {HOST} = {REALM}\n"
        )
        profile = folder / "kdc.conf"
        profile.write_text(
            f"[kdcdefaults]\n kdc_listen = 127.0.0.1:{port}\n kdc_tcp_listen = 127.0.0.1:{port}\n"
            f"[realms]\n {REALM} = {{\n  database_name = {folder}/principal\n"
            f"  key_stash_file = {folder}/stash\n  max_renewable_life = 1d\n"
            "  supported_enctypes = aes256-cts-hmac-sha1-96:normal\n }\n"
        )
        self.environment = {
            "PATH": _PATH,
            "KRB5_CONFIG": str(self.config),
            "KRB5_KDC_PROFILE": str(profile),
        }
        self.run("kdb5_util", "create", "-s", "-r", REALM, "-P", "secret of the tests")
        said = opened.enter_context((folder / "kdc.log").open("wb"))
        self.process = subprocess.Popen(
            [shutil.which("krb5kdc", path=_PATH), "-n"],
            env=self.environment,
            stdout=said,
            stderr=said,
        )
        opened.callback(self.process.wait, 30)
        opened.callback(self.process.kill)
        self._wait()

    def run(self, *command: str) -> None:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (command, done.stdout + done.stderr)

    def keytab(self, principal: str, *options: str) -> Path:
        """Make a principal; return the file with its key."""
        path = self.folder / f"{principal.replace('/', '-')}.keytab"
        self.run("kadmin.local", "-q", f"addprinc {' '.join(options)} -randkey {principal}")
        self.run("kadmin.local", "-q", f"ktadd -k {path} -norandkey {principal}")
        return path

    def take_ticket(self, principal: str, cache: Path, *options: str) -> None:
        """Put a ticket into a file, as ``kinit`` does."""
        keytab = self.folder / f"{principal}.keytab"
        self.run("kinit", "-c", f"FILE:{cache}", "-k", "-t", str(keytab), *options, principal)

    def _wait(self) -> None:
        self.keytab("probe")
        pause = threading.Event()
        for _ in range(300):
            assert self.process.poll() is None, (self.folder / "kdc.log").read_text()
            try:
                self.take_ticket("probe", self.probe)
            except AssertionError:
                pause.wait(0.2)
            else:
                return
        raise AssertionError((self.folder / "kdc.log").read_text())

    def yarn_settings(self) -> dict[str, object]:
        """Return what a YARN needs, beside what its HDFS does, to want Kerberos; its pages and metrics don't."""
        server = f"yarn/{HOST}"
        key = self.keytab(server)
        nodes = ("resourcemanager", "nodemanager")
        principals = {f"yarn.{node}.principal": f"{server}@{REALM}" for node in nodes}
        return principals | {
            **{f"yarn.{node}.keytab": key for node in nodes},
            "hadoop.http.authentication.type": "simple",
        }

    def gateway_settings(self) -> dict[str, object]:
        """Return what makes a gateway (HttpFS) one that wants Kerberos, before an HDFS that does."""
        web, server = f"HTTP/{HOST}", f"gateway/{HOST}"
        web_keys, keys = self.folder / f"HTTP-{HOST}.keytab", self.keytab(server)
        own = {
            "httpfs.hadoop.authentication.type": "kerberos",
            "httpfs.hadoop.authentication.kerberos.principal": f"{server}@{REALM}",
            "httpfs.hadoop.authentication.kerberos.keytab": keys,
        }
        shown = {
            "type": "kerberos",
            "kerberos.principal": f"{web}@{REALM}",
            "kerberos.keytab": web_keys,
            "token.validity": 2,
        }
        return own | {
            f"{prefix}.authentication.{name}": value
            for prefix in ("httpfs", "hadoop.http")
            for name, value in shown.items()
        }

    def hdfs_settings(self) -> dict[str, object]:
        """Return what makes an HDFS one that wants Kerberos; the users "alice" and "carol" may do everything there.

        Cookies are valid for two seconds, so clients have to show tickets again and again.
        """
        server, web = f"hdfs/{HOST}", f"HTTP/{HOST}"
        keys, web_keys = self.keytab(server), self.keytab(web)
        own = {
            f"dfs.{node}.kerberos.principal": f"{server}@{REALM}"
            for node in ("namenode", "datanode")
        }
        return own | {
            "hadoop.security.authentication": "kerberos",
            "hadoop.user.group.static.mapping.overrides": "alice=supergroup;carol=supergroup;bob=bob;dora=dora;hdfs=hdfs",
            "dfs.block.access.token.enable": "true",
            "dfs.namenode.keytab.file": keys,
            "dfs.datanode.keytab.file": keys,
            "dfs.web.authentication.kerberos.principal": f"{web}@{REALM}",
            "dfs.web.authentication.kerberos.keytab": web_keys,
            "hadoop.http.authentication.type": "kerberos",
            "hadoop.http.authentication.kerberos.principal": f"{web}@{REALM}",
            "hadoop.http.authentication.kerberos.keytab": web_keys,
            "hadoop.http.authentication.token.validity": 2,
            "ignore.secure.ports.for.testing": "true",
            "hadoop.proxyuser.gateway.hosts": "*",
            "hadoop.proxyuser.gateway.groups": "*",
        }
