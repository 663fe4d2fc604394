"""A server of Google Cloud Storage's XML protocol for tests, written from Google's reference of it; in memory, and in this process.

It takes what a client of state needs: objects that are put, also on the condition that the name is free (`x-goog-if-generation-match: 0`), read,
asked for, deleted and listed page by page. A request is signed as Google's AIP-4111 says, by a token of the service account's own RSA key, and a
signature that is wrong or a token that has expired is refused. No emulator that can be installed speaks this protocol as a whole.
"""

import base64
import hashlib
import json
import shutil
import subprocess
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

HOW_TO_GET_IT = "no openssl, which makes the key of the tests' account in Google's protocol: apt install openssl"
ACCOUNT = "tester@project.iam.gserviceaccount.com"
_SCOPES = {
    f"https://www.googleapis.com/auth/{name}"
    for name in ("cloud-platform", "devstorage.read_write", "devstorage.full_control")
}
_PAGE_NAMES_MAX = 5  # of a listing: the protocol lets a server give fewer than were asked for
_SHA256 = bytes.fromhex("3031300d060960864801650304020105000420")  # PKCS #1: which digest follows


def can_serve():
    """Return whether a key can be made here."""
    return shutil.which("openssl") is not None


@dataclass(frozen=True)
class AccountKey:
    """The key of a service account: what Google's console gives as a file of JSON, and what Google keeps of it."""

    pem: str
    modulus: int

    @classmethod
    def make(cls):
        def openssl(*arguments, given=None):
            return subprocess.run(
                ["openssl", *arguments], input=given, capture_output=True, text=True, check=True
            ).stdout

        pem = openssl("genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048")
        modulus = openssl("rsa", "-noout", "-modulus", given=pem)
        return cls(pem, int(modulus.strip().partition("=")[2], 16))

    def to_json(self):
        about = {"type": "service_account", "client_email": ACCOUNT, "private_key_id": "1"}
        return json.dumps(about | {"private_key": self.pem})

    def takes(self, token):
        """Return whether a token is signed by this key (RSASSA-PKCS1-v1_5 with SHA-256), in force, and of the account."""
        try:
            head, claims, signature = token.split(".")
            said = {**json.loads(_decoded(head)), **json.loads(_decoded(claims))}
            opened = pow(int.from_bytes(_decoded(signature)), 65537, self.modulus)
        except ValueError:
            return False
        size = (self.modulus.bit_length() + 7) // 8
        digest = _SHA256 + hashlib.sha256(f"{head}.{claims}".encode()).digest()
        wanted = b"\x00\x01" + b"\xff" * (size - len(digest) - 3) + b"\x00" + digest
        in_force = said.get("iat", 0) - 60 <= time.time() < said.get("exp", 0)
        right = said.get("alg") == "RS256" and said.get("iss") == ACCOUNT
        allowed = bool(_SCOPES & set(said.get("scope", "").split()))
        return opened.to_bytes(size) == wanted and in_force and right and allowed


def _decoded(text):
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


@dataclass
class Buckets:
    """What the server keeps: of each bucket the objects by name, each with its generation."""

    names: dict[str, dict[str, tuple[bytes, int]]]
    key: AccountKey
    _generation: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, bucket, name, data, generation_match):
        """Keep an object; return its generation, None if the one that is there has another one than it must have."""
        with self._lock:
            there = self.names[bucket].get(name, (b"", 0))[1]
            if generation_match is not None and int(generation_match) != there:
                return None
            self._generation += 1
            self.names[bucket][name] = data, self._generation
            return self._generation

    def get(self, bucket, name):
        with self._lock:
            return self.names[bucket].get(name)

    def delete(self, bucket, name):
        with self._lock:
            return self.names[bucket].pop(name, None) is not None

    def page(self, bucket, prefix, after, count):
        """Return the next names with sizes and generations, and whether there are more."""
        with self._lock:
            found = sorted(
                (name, len(data), generation)
                for name, (data, generation) in self.names[bucket].items()
                if name.startswith(prefix) and name > after
            )
        return found[:count], len(found) > count


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    buckets: Buckets

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    def log_message(self, *_):
        """Say nothing."""

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status, code, message):
        text = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
        self.answer(status, text.encode(), Content_Type="application/xml; charset=UTF-8")

    def do_any(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:  # torn: there is no such object
            self.close_connection = True
            return
        url = urlsplit(self.path)
        bucket, _, name = url.path.removeprefix("/").partition("/")
        bucket, name, query = unquote(bucket), unquote(name), parse_qs(url.query)
        kind, _, token = self.headers.get("Authorization", "").partition(" ")
        if kind != "Bearer" or not self.buckets.key.takes(token):
            self.refuse(401, "AuthenticationRequired", f"Authentication required: {token[:20]}")
        elif bucket not in self.buckets.names:
            self.refuse(404, "NoSuchBucket", "The specified bucket does not exist.")
        elif not name and self.command == "GET":
            self.list(bucket, {key: values[0] for key, values in query.items()})
        elif self.command == "PUT":
            self.put(bucket, name, body)
        elif self.command == "DELETE":
            found = self.buckets.delete(bucket, name)
            self.answer(204) if found else self.no_such_key()
        else:
            self.get(bucket, name)

    do_GET = do_HEAD = do_PUT = do_DELETE = do_any  # noqa: N815 - the names that the class wants

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.refuse(400, "InvalidArgument", "This server has no uploads in parts.")

    def no_such_key(self):
        self.refuse(404, "NoSuchKey", "The specified key does not exist.")

    def put(self, bucket, name, data):
        wanted = self.headers.get("x-goog-if-generation-match")
        generation = self.buckets.put(bucket, name, data, wanted)
        if generation is None:
            return self.refuse(
                412,
                "PreconditionFailed",
                "At least one of the pre-conditions you specified did not hold.",
            )
        return self.answer(200, **self.about(data, generation))

    def get(self, bucket, name):
        found = self.buckets.get(bucket, name)
        if found is None:
            return self.no_such_key()
        return self.answer(200, found[0], **self.about(*found))

    def about(self, data, generation):
        etag = f'"{hashlib.md5(data).hexdigest()}"'
        when = formatdate(usegmt=True)
        return {"ETag": etag, "x_goog_generation": generation, "Last_Modified": when}

    def list(self, bucket, query):
        assert query.get("list-type") == "2", query
        after = query.get("continuation-token") or query.get("start-after", "")
        count = min(int(query.get("max-keys", 1000)), _PAGE_NAMES_MAX)
        found, more = self.buckets.page(bucket, query.get("prefix", ""), after, count)
        contents = "".join(
            f"<Contents><Key>{escape(name)}</Key><Generation>{generation}</Generation><MetaGeneration>1</MetaGeneration>"
            f'<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>"{generation}"</ETag><Size>{size}</Size></Contents>'
            for name, size, generation in found
        )
        token = (
            f"<NextContinuationToken>{escape(found[-1][0])}</NextContinuationToken>" if more else ""
        )
        text = (
            "<?xml version='1.0' encoding='UTF-8'?><ListBucketResult xmlns='http://doc.s3.amazonaws.com/2006-03-01'>"
            f"<Name>{bucket}</Name><Prefix>{escape(query.get('prefix', ''))}</Prefix><KeyCount>{len(found)}</KeyCount>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{contents}</ListBucketResult>"
        )
        self.answer(200, text.encode(), Content_Type="application/xml; charset=UTF-8")


def environment(port, key):
    """Return what a client of the server has in its environment."""
    return {
        "GOOGLE_BASE_URL": f"http://127.0.0.1:{port}",
        "GOOGLE_SERVICE_ACCOUNT_KEY": key.to_json(),
    }


@contextmanager
def google_server(*names):
    """Serve empty buckets until the block ends; give the port and the key of the account that may use them."""
    key = AccountKey.make()
    buckets = Buckets({name: {} for name in names}, key)
    handler = type("Handler", (_Request,), {"buckets": buckets})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    serving = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    serving.start()
    try:
        yield server.server_address[1], key
    finally:
        server.shutdown()
        server.server_close()
        serving.join()
