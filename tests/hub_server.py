"""A fake Hub on this machine: it answers an upload's requests as the Hub does, and records them."""

import base64
import hashlib
import json
import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

import huggingface_hub
from huggingface_hub import constants

TOKEN = "hf_only_for_tests"
OWNER = "owner"


@dataclass
class Hub:
    """Repositories, objects and the requests in their order."""

    address: str = ""
    requests: list[tuple[str, str]] = field(default_factory=list)
    """(method, path) of each."""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Name -> file -> content."""
    created: list[dict] = field(default_factory=list)
    """The request that made each new repository."""
    commits: list[list[str]] = field(default_factory=list)
    """Files of each commit."""
    objects: dict[str, bytes] = field(default_factory=dict)
    """Large files by SHA-256."""
    refuse: dict[str, int] = field(default_factory=dict)
    """End of a path -> the status it is refused with."""
    silent: bool = False
    """Requests are received but not answered."""
    closing: Event = field(default_factory=Event)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        return self.server.hub

    def do_POST(self):
        self._answer("POST")

    def do_PUT(self):
        self._answer("PUT")

    def do_GET(self):
        self._answer("GET")

    def log_message(self, *arguments):
        pass

    def _answer(self, method: str):
        body, path = self._body(), self.path.partition("?")[0]
        self.hub.requests.append((method, path))
        if self.hub.silent:
            # Longer than any test waits, but not forever.
            self.hub.closing.wait(10)
            self.close_connection = True
            return
        refused = next((status for end, status in self.hub.refuse.items() if path.endswith(end)), None)
        if refused:
            return self._send({"error": "refused"}, refused)
        # The address of a large file needs no token; all other requests do.
        if not path.startswith("/objects/") and self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self._send({"error": "Invalid credentials"}, 401)
        for pattern, respond in ROUTES.items():
            match = re.fullmatch(pattern, f"{method} {path}")
            if match:
                return self._send(*respond(self.hub, body, *match.groups()))
        return self._send({"error": f"no route {method} {path}"}, 404)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, content: dict, status: int = 200):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _create(hub: Hub, body: bytes):
    wanted = json.loads(body)
    name = f"{wanted['organization'] or OWNER}/{wanted['name']}"
    status = 409 if name in hub.repositories else 200
    if status == 200:
        hub.repositories[name] = {}
        hub.created.append(wanted)
    return {"url": f"{hub.address}/{name}"}, status


def _validate(hub: Hub, body: bytes):
    return ({"errors": [], "warnings": []},)


def _modes(hub: Hub, body: bytes, name: str):
    files = [
        {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular"}
        for f in json.loads(body)["files"]
    ]
    return ({"files": [{**file, "shouldIgnore": False, "oid": None} for file in files]},)


def _batch(hub: Hub, body: bytes, name: str):
    objects = [
        {**wanted, "actions": {"upload": {"href": f"{hub.address}/objects/{wanted['oid']}"}}}
        for wanted in json.loads(body)["objects"]
    ]
    return ({"transfer": "basic", "objects": objects},)


def _store(hub: Hub, body: bytes, digest: str):
    assert hashlib.sha256(body).hexdigest() == digest
    hub.objects[digest] = body
    return ({},)


def _commit(hub: Hub, body: bytes, name: str):
    files = {}
    for line in body.splitlines():
        operation = json.loads(line)
        value = operation["value"]
        if operation["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif operation["key"] == "lfsFile":
            files[value["path"]] = hub.objects[value["oid"]]
    hub.repositories[name] |= files
    hub.commits.append(list(files))
    oid = f"{len(hub.commits):040x}"
    return ({"success": True, "commitOid": oid, "commitUrl": f"{hub.address}/{name}/commit/{oid}"},)


ROUTES = {
    "POST /api/repos/create": _create,
    "POST /api/validate-yaml": _validate,
    "POST /api/models/(.+)/preupload/main": _modes,
    r"POST /(.+)\.git/info/lfs/objects/batch": _batch,
    "PUT /objects/(.+)": _store,
    "POST /api/models/(.+)/commit/main": _commit,
}


@contextmanager
def serve(monkeypatch):
    """Start the fake; until the end huggingface_hub of this process uses no other Hub, and has a token for it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.hub = Hub(f"http://127.0.0.1:{server.server_port}")
    use(monkeypatch, server.hub.address)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server.hub
    finally:
        server.hub.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()
        huggingface_hub.close_session()


def use(monkeypatch, address: str):
    """Make `address` the Hub of this process."""
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # Xet has its own protocol and servers; this is the upload without it.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    huggingface_hub.close_session()
