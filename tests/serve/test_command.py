"""vir serve as it is started: on the loopback address, with words where it cannot."""

import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.serve.photographs import PAVILION
from tests.serve.served import served
from vir import weights
from vir.cli import app
from vir.cli.serving import serve

run = CliRunner().invoke


def test_it_listens_to_this_machine_alone_by_default() -> None:
    assert serve.__defaults__ is not None
    assert "127.0.0.1" in serve.__defaults__
    with served() as url:
        assert url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(f"{url}/answer", PAVILION.read_bytes(), timeout=60) as reply:
            assert b"church" in reply.read()
        strange = urllib.request.Request(f"{url}/model", headers={"Host": "elsewhere.example"})
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(strange, timeout=60)
        port = f"{int(url.rpartition(':')[2]):04X}"
        listeners = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        assert f"0100007F:{port}" in listeners  # 127.0.0.1
        assert f"00000000:{port}" not in listeners


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run(app, ["serve", "--no-open", "--port", str(taken.getsockname()[1])])
    assert result.exit_code == 2
    assert "Take another --port" in " ".join(result.output.split())


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = run(app, ["serve", "--no-open"])
    assert result.exit_code == 2
    assert "pip install fastapi uvicorn" in " ".join(result.output.split())


def test_a_checkpoint_that_is_not_there() -> None:
    result = run(app, ["serve", "--no-open", "--checkpoint", "nothing"])
    assert result.exit_code == 2
    assert "does not exist" in result.output


@pytest.mark.parametrize(
    ("also", "says"),
    [
        (weights.DEFAULT, "was trained for classification, expected detection or segmentation"),
        ("nothing", "does not exist"),
        (str(PAVILION), "is not a whole safetensors file"),
    ],
)
def test_a_further_model_that_is_none(also: str, says: str) -> None:
    result = run(app, ["serve", "--no-open", "--port", "0", "--also", also])
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())
