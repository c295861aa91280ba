"""Serve pages to one person on this machine, and to nobody else.

Who asks has to know the token in the address, which is drawn at each start. So a page stays closed to other programs,
to a site whose name leads to this machine (DNS rebinding), and to links on strange sites. Other users of the machine
may see the token among the arguments of the browser that is opened: BROWSER=true opens none. Nothing is posted, no file
is read, and one request is answered at a time, so a program of this machine can keep others waiting.
"""

import secrets
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from socket import SHUT_RDWR
from threading import Thread, Timer
from urllib.parse import parse_qsl

from torch import Tensor

from tril import page
from tril.errors import UserError
from tril.experiments import Change, change_of
from tril.inspection import Inspection
from tril.kinds import choose_heads
from tril.look import Captured
from tril.metrics import Head
from tril.weights import NotTheKernels

PATIENCE = 0.5  # seconds
EFFORT = 0.003  # of that for a saved page, while somebody waits
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "private, max-age=86400",  # an address always has the same page, so a browser may go back to it
    "Referrer-Policy": "no-referrer",
}


class Handler(BaseHTTPRequestHandler):
    """Answers one request to a server that has an `address`, and an `answer` to what it is asked for."""

    error_message_format = "%(explain)s"  # escaped

    def handle(self) -> None:
        """Read a request and answer it. It has PATIENCE to arrive: browsers open connections that they may not use."""
        self.clock = Timer(PATIENCE, self.hang_up)
        self.clock.start()
        with suppress(OSError):  # who asked may be gone
            super().handle()
        self.clock.cancel()

    def hang_up(self) -> None:
        """End the request, however slowly it arrives."""
        with suppress(OSError):
            self.connection.shutdown(SHUT_RDWR)

    def do_GET(self) -> None:
        """Send the page that is asked for, or a sentence that says why there is none."""
        self.clock.cancel()
        path, _, query = self.path.partition("?")
        address = f"http://{self.headers['Host']}{path}".replace("localhost", "127.0.0.1")
        is_known = secrets.compare_digest(address.encode(), self.server.address.encode())
        if not is_known or self.headers["Sec-Fetch-Site"] == "cross-site":
            return self.send_error(403, explain="this address is of another start: open the one that is printed now")
        try:
            content = self.server.answer(**dict(parse_qsl(query))).encode()
        except (UserError, NotTheKernels) as error:
            return self.send_error(400, explain=str(error))
        self.connection.settimeout(30)
        self.send_response(200)
        for name, value in {**HEADERS, "Content-Length": len(content)}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Print nothing: an address has the token."""


def answers(plain: Inspection, written: str) -> Callable[..., str]:
    """Return the function that makes the page of a text with heads changed.

    plain: of the model as it is, on the first text; its scores on the probe are shown with any text. written: the text
    in the form, at first.
    """

    def read(box: str, text: str) -> Inspection:
        try:
            return plain.on(text)
        except UserError as error:
            raise UserError(f"{box}: {error}") from error

    def answer(text: str | None = None, other: str = "", **changes: str) -> str:
        """Return the page of a text. changes: "zero", "mean" or "patch" (from the other text) -> heads."""
        found = plain if text is None else read("text", text)
        if other or "patch" in changes:
            beside = read("other", other)
        edits = {}
        for mode, names in changes.items():
            change = mode != "patch" and change_of(mode)
            for head in choose_heads(names.split() or "", plain.att.shape):
                edits[head] = change or patch(beside.att, head)
        new = replace(found, measured=found.shown, probe=None, edits=edits, effort=EFFORT, plain=plain, corpus=None)
        columns = {"as it is": found, "changed": new} if edits else {"as it is": new}
        if other:
            columns["other"] = beside
        data = new.page_data()
        data.texts["columns"] = [(name, each.labels, each.predictions) for name, each in columns.items()]
        return page.render([data], written)

    return answer


def patch(att: Captured, head: Head) -> Change:
    """Return the change of a head's output to the one on another text."""
    layer, number = head
    other = att.calls[layer].of_head(number).output()[:, 0]

    def change(output: Tensor) -> Tensor:
        if other.size(1) != output.size(1):
            raise UserError(f"a patch needs as many tokens: the text has {output.size(1)}, the other {other.size(1)}")
        return other

    return change


def serve(answer: Callable[..., str]) -> None:
    """Serve pages until Ctrl-C. Print the address, and open it if there is a browser.

    answer: returns the page for the parameters of an address, as answer(text="To be"). The person is shown a UserError.
    """
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.answer = answer
        server.address = f"http://127.0.0.1:{server.server_port}/{secrets.token_urlsafe()}/"
        print(f"live:   {server.address}")
        print("        open it in a browser on this machine; Ctrl-C ends it")
        Thread(target=webbrowser.open, args=[server.address], daemon=True).start()  # a browser may wait for the page
        server.serve_forever()
