"""Serve pages to one person on this machine, and to nobody else.

Who asks has to know the token in the address, which is drawn at each start. So a page stays closed to other users and
programs, to a site whose name leads to this machine (DNS rebinding), and to links on strange sites. Nothing is posted,
no file is read, and one request is answered at a time.
"""

import secrets
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qsl

from errors import UserError

# The same address always has the same page, so a browser may keep it to go back.
HEADER = b"""HTTP/1.0 200 OK\r
Content-Type: text/html; charset=utf-8\r
Cache-Control: private, max-age=86400\r
Referrer-Policy: no-referrer\r
\r
"""


class Handler(BaseHTTPRequestHandler):
    """Answers one request to a server that has an `address`, and an `answer` to what it is asked for."""

    timeout = 0.5  # seconds until a silent one is left: browsers open connections that they may not use
    error_message_format = "%(explain)s"  # escaped

    def do_GET(self) -> None:
        """Send the page that is asked for, or a sentence that says why there is none."""
        path, _, query = self.path.partition("?")
        address = f"http://{self.headers['Host']}{path}".replace("localhost", "127.0.0.1")
        is_known = secrets.compare_digest(address.encode(), self.server.address.encode())
        if not is_known or self.headers["Sec-Fetch-Site"] == "cross-site":
            return self.send_error(403)
        try:
            page = self.server.answer(**dict(parse_qsl(query)))
        except UserError as error:
            return self.send_error(400, explain=str(error))
        self.connection.settimeout(30)
        with suppress(ConnectionError):  # who asked may be gone
            self.wfile.write(HEADER + page.encode())

    def log_message(self, *_: object) -> None:
        """Print nothing: an address has the token."""


def serve(answer: Callable[..., str]) -> None:
    """Serve pages until Ctrl-C. Print the address, and open it if there is a browser.

    answer: returns the page for the parameters of an address, as answer(text="To be"). The person is shown a UserError.
    """
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.answer = answer
        server.address = f"http://127.0.0.1:{server.server_port}/{secrets.token_urlsafe()}/"
        print(f"live:   {server.address}")
        print("        open it in a browser on this machine; Ctrl-C ends it")
        webbrowser.open(server.address)
        server.serve_forever()
