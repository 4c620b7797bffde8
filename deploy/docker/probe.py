#!/opt/specserve/bin/python -IS
"""specserve-probe PATH [KEY_FILE]: ask the server of this container; 0 if it answers with a 200.

It imports little, as it is run every few seconds. PORT is the server's port, 8000 if unset. SCHEME
is http, which is the default, or https; the certificate is not verified, as the address is this
container's own.
"""

import os
import socket
import sys

SECONDS = 4


def connect(scheme: str, port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), SECONDS)
    if scheme == "http":
        return connection
    import ssl

    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(connection)


def ask(scheme: str, port: int, path: str, key: str | None) -> str:
    """The first line of the answer."""
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{authorization}\r\n"
    with connect(scheme, port) as connection:
        connection.sendall(request.encode())
        return connection.makefile(encoding="latin-1").readline().strip()


def first_key(file: str) -> str | None:
    with open(file, encoding="utf-8") as lines:
        keys = (line.strip() for line in lines)
        return next((key for key in keys if key and not key.startswith("#")), None)


def main(path: str, key_file: str | None = None) -> int:
    scheme = os.environ.get("SCHEME", "http")
    if scheme not in ("http", "https"):
        print(f"SCHEME={scheme}: set it to http or https, or leave it unset")
        return 1
    try:
        key = None if key_file is None else first_key(key_file)
        answer = ask(scheme, int(os.environ.get("PORT", "8000")), path, key)
    except OSError as e:
        answer = f"no answer: {e}"
    print(f"{path}: {answer}")
    return 0 if answer.startswith("HTTP/1.1 200 ") else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
