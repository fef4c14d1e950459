"""Fetch one file by URL: resumed where the server allows it, checked, and only then given its name."""

import hashlib
import os
import urllib.error
import urllib.request
from pathlib import Path

from fire_core.errors import UserError

BLOCK = 1 << 20


def fetch(url: str, path: Path, md5: str) -> Path:
    """Download `url` to `path` unless it is there already.

    The bytes go to `<path>.part`, which a later call continues; `path` appears only once the MD5 sum is right (the sum
    that the data set's authors publish: against accidents, not against malice). Raises `UserError` when there is
    no connection or the sum is wrong.
    """
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        _continue(url, part)
    except (urllib.error.URLError, OSError) as error:
        raise UserError(
            f"could not download {url} ({error}): get the file by another way and put it at {path}"
        ) from error
    found = checksum(part)
    if found != md5:
        part.unlink()
        raise UserError(
            f"{url} has MD5 {found} instead of {md5}: the download was dropped, run the command again"
        )
    os.replace(part, path)
    return path


def checksum(path: Path) -> str:
    """MD5 of a file, in hex."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _continue(url: str, part: Path) -> None:
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing is left to fetch: the file was complete
            return
        raise
    with response, part.open("ab" if getattr(response, "status", 200) == 206 else "wb") as file:
        total = done + int(response.headers.get("Content-Length") or 0)
        print(f"downloading {url} ({total / 1e6:.0f} MB)")
        while block := response.read(BLOCK):
            file.write(block)
