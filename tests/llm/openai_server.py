"""A service with the few endpoints of OpenAI's that fine-tuning needs, on this machine."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

KEY = "sk-test-0123456789abcdef"
MODEL = "ft:gpt-4o-2024-08-06:us::one"


class Service:
    """What the service has, and how it is to behave."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.jobs: list[dict[str, Any]] = []
        self.requests: list[tuple[str, float]] = []
        self.asked: list[dict[str, Any]] = []
        self.answer: Callable[[str], str] = lambda prompt: "[]"
        self.drop_creation = ""
        """after: the job is created and the connection dropped; before: only the latter."""
        self.newer_jobs: list[dict[str, Any]] = []
        """Jobs of others that appear right after one is created."""
        self.refuse_creation = 0
        """An HTTP status for the creation of jobs, which creates none."""
        self.listed = True
        """Whether jobs are listed; otherwise that fails."""
        self.limited = 0
        """Chat requests that are still to be limited."""
        self.retry_after = "1"
        self.slow_after: int | None = None
        """Chat requests after so many get no answer while `released` is not set."""
        self.released = threading.Event()
        self.outcome: dict[str, Any] = {"status": "succeeded", "fine_tuned_model": MODEL}

    def count(self, request: str) -> int:
        return sum(name == request for name, _ in self.requests)


def job_of(number: int, body: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"ftjob-{number}",
        "object": "fine_tuning.job",
        "created_at": int(time.time()),
        "status": "validating_files",
        "fine_tuned_model": None,
        "error": None,
        "trained_tokens": None,
        "hyperparameters": {},
        "organization_id": "org-1",
        "result_files": [],
        **body,
    }


class Handler(BaseHTTPRequestHandler):
    service: Service

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""

    def do_GET(self) -> None:
        path = self.path.split("?")[0].removeprefix("/v1")
        if not self.begin(f"GET {path}"):
            return
        jobs = self.service.jobs
        if path == "/fine_tuning/jobs":
            if not self.service.listed:
                self.reply(400, {"error": {"message": "no list"}})
                return
            self.list_jobs(parse_qs(urlsplit(self.path).query).get("after", [""])[0])
        elif path.endswith("/events"):
            messages = ["Created fine-tuning job", "Step 10/25", "The job has ended"]
            events = [
                {"id": f"e{i}", "object": "fine_tuning.job.event", "created_at": i}
                | {"level": "info", "message": message}
                for i, message in enumerate(messages)
            ]
            self.reply(200, {"object": "list", "data": events[::-1], "has_more": False})
        else:
            job = next(job for job in jobs if path.endswith(job["id"]))
            self.reply(200, {**job, **self.service.outcome})

    def do_POST(self) -> None:
        path = self.path.removeprefix("/v1")
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if not self.begin(f"POST {path}"):
            return
        if path == "/files":
            self.upload(body)
        elif path == "/fine_tuning/jobs":
            self.create(json.loads(body))
        else:
            self.complete(json.loads(body))

    def begin(self, request: str) -> bool:
        """Note the request; answer 401, key and all, if it has another key."""
        self.service.requests.append((request, time.monotonic()))
        key = self.headers.get("authorization", "").removeprefix("Bearer ")
        if key == KEY:
            return True
        self.reply(401, {"error": {"message": f"Incorrect API key provided: {key}."}})
        return False

    def list_jobs(self, after: str) -> None:
        """A page of one job: the newest, or the one before `after`."""
        newest_first = self.service.jobs[::-1]
        names = [job["id"] for job in newest_first]
        start = names.index(after) + 1 if after else 0
        more = start + 1 < len(names)
        page = newest_first[start : start + 1]
        self.reply(200, {"object": "list", "data": page, "has_more": more})

    def upload(self, body: bytes) -> None:
        name = f"file-{len(self.service.files)}"
        self.service.files[name] = body
        self.reply(
            200,
            {"id": name, "object": "file", "bytes": len(body), "created_at": 1}
            | {"filename": "x.jsonl", "purpose": "fine-tune", "status": "processed"},
        )

    def create(self, body: dict[str, Any]) -> None:
        service = self.service
        if service.refuse_creation:
            self.reply(service.refuse_creation, {"error": {"message": "not this model"}})
            return
        if service.drop_creation != "before":
            service.jobs.append(job_of(len(service.jobs), body))
            service.jobs += service.newer_jobs
        if service.drop_creation:
            self.close_connection = True
            return
        self.reply(200, service.jobs[-1 - len(service.newer_jobs)])

    def complete(self, body: dict[str, Any]) -> None:
        service = self.service
        if service.limited:
            service.limited -= 1
            headers = {"retry-after": service.retry_after}
            self.reply(429, {"error": {"message": "Rate limit reached"}}, headers)
            return
        if service.slow_after is not None and len(service.asked) >= service.slow_after:
            service.released.wait(20)
            return
        service.asked.append(body)
        message = {"role": "assistant", "content": service.answer(body["messages"][-1]["content"])}
        self.reply(
            200,
            {"id": "chat-1", "object": "chat.completion", "created": 1, "model": body["model"]}
            | {"choices": [{"index": 0, "finish_reason": "stop", "message": message}]}
            | {"usage": {"prompt_tokens": 140, "completion_tokens": 190, "total_tokens": 330}},
        )

    def reply(self, code: int, data: Any, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(data).encode()
        self.send_response(code)
        for name, value in {"content-type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def serve(service: Service) -> ThreadingHTTPServer:
    """A server in a thread; its address is server_address."""
    handler = type("OwnHandler", (Handler,), {"service": service})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    ).start()
    return server
