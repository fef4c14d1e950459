"""Download of one file, resumed if the server allows it, and renamed only after its checksum is right."""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from fire_core.errors import UserError
from fire_core.files import written_aside

BLOCK = 1 << 20


def fetch(urls: Sequence[str], path: Path, md5: str) -> Path:
    """Download `path` from the first of `urls` that has the right file, unless it exists already, and return `path`.

    The bytes go to `<path>.part`, which a later call continues; `path` appears only once the MD5 sum is right. The sum
    detects damaged files, not malicious ones. A file with another sum at `path` is replaced. Raises UserError if no
    address answers with the right file.
    """
    if path.is_file() and checksum(path) == md5:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    failures = []
    for url in urls:
        try:
            _continue(url, part)
        except (http.client.HTTPException, OSError, ValueError) as error:
            failures.append(f"{url} ({error})")
            continue
        found = checksum(part)
        if found == md5:
            with written_aside(path) as aside:
                part.rename(aside)
            return path
        part.unlink()
        failures.append(f"{url} (MD5 {found} instead of {md5}, dropped)")
    raise UserError(f"could not download {' or '.join(failures)}: run again, or put the file at {path}")


def checksum(path: Path) -> str:
    """Return the MD5 sum of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _continue(url: str, part: Path) -> None:
    """Append to `part` what is missing of the file at `url`; start over if the server sends the whole file."""
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing is left to fetch: the file was complete
            return
        raise
    done = done if response.status == 206 else 0
    length = response.headers.get("Content-Length")
    total = done + int(length) if length else None
    name = part.name.removesuffix(".part")
    bar = tqdm(desc=name, initial=done, total=total, unit="B", unit_scale=True)
    with response, part.open("ab" if done else "wb") as file, bar:
        while block := response.read(BLOCK):
            file.write(block)
            bar.update(len(block))
    if total is not None and part.stat().st_size < total:
        raise ConnectionError(f"the connection ended after {part.stat().st_size:,} of {total:,} bytes")
