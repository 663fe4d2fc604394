"""A registry of images for machines: the distribution project's own, over TLS, with the images of the tests.

It is built by ``tools/kubernetes_programs.py``. Machines ask it in the place of ``registry.example.org``, by what containerd calls a
hosts file; so the manifests keep the name of their image.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import image as images
from machine import HOST_IP, Network

BUILT = ("registry",)
_PORT = 5000
_SETTINGS = """\
version: 0.1
log: {{level: warn}}
storage: {{filesystem: {{rootdirectory: {folder}/objects}}}}
http:
  addr: {address}
  tls: {{certificate: {folder}/ca.crt, key: {folder}/registry.key}}
"""
_HOSTS = """\
server = "https://{address}"
[host."https://{address}"]
  capabilities = ["pull", "resolve"]
  ca = "{folder}/ca.crt"
"""


class Registry:
    """A registry in a network of machines; ``hosts`` is the folder that tells containerd of it."""

    def __init__(self, network: Network) -> None:
        self._network, self._folder = network, network.folder / "registry"
        self._address = f"{HOST_IP}:{_PORT}"
        self.hosts = self._folder / "hosts"
        name = images.IMAGE.partition("/")[0]
        (self.hosts / name).mkdir(parents=True)
        given = {"folder": self._folder, "address": self._address}
        (self.hosts / name / "hosts.toml").write_text(_HOSTS.format(**given))
        (self._folder / "registry.yaml").write_text(_SETTINGS.format(**given))
        self._make_certificate()
        network.start("registry", "registry", "serve", self._folder / "registry.yaml")
        connect = network.inside("socat", "/dev/null", f"TCP:{self._address}")
        network.wait_for(
            "the registry", lambda: not subprocess.run(connect, check=False).returncode
        )

    def _make_certificate(self) -> None:
        files = ["-keyout", self._folder / "registry.key", "-out", self._folder / "ca.crt"]
        words = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *files]
        names = ["-subj", "/CN=registry", "-addext", f"subjectAltName=IP:{HOST_IP}"]
        subprocess.run(["openssl", *words, *names], check=True, capture_output=True)

    def push(self, image: str) -> None:
        """Push an image of the tests' storage, under its name."""
        name = image.partition("/")[2]
        certificates = f"--cert-dir={self._certificates()}"
        # compressing a gigabyte takes longer than carrying it
        how = ["--quiet", "--format=oci", "--disable-compression", certificates]
        pushed = ["buildah", *images.storage(), "push", *how, image]
        command = self._network.inside(*pushed, f"docker://{self._address}/{name}")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def _certificates(self) -> Path:
        folder = self._folder / "trusted"
        folder.mkdir(exist_ok=True)
        (folder / "ca.crt").write_bytes((self._folder / "ca.crt").read_bytes())
        return folder
