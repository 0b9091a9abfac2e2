"""A hundred credentials of thirty kinds, and whatever names the user, at the door to others."""

from __future__ import annotations

import base64
import random
import string
from collections.abc import Callable

import pytest

from twinrun.foundation.errors import InputError
from twinrun.foundation.processes import last_lines
from twinrun.foundation.redaction import HiddenNames, demand_clean, leaving

DRAW = random.Random(28)


def letters(count: int, kinds: str = string.ascii_letters + string.digits) -> str:
    return "".join(DRAW.choices(kinds, k=count - 3)) + ("aA1" if len(kinds) > 10 else "123")


def hexadecimal(count: int) -> str:
    return f"{DRAW.getrandbits(4 * count):0{count}x}"


def coded(count: int) -> str:
    return base64.b64encode(DRAW.randbytes(count)).decode()


# What a line says around a secret, and the secret.
KINDS: dict[str, Callable[[], tuple[str, str]]] = {
    "GitHub": lambda: ("pushed by {}", f"gh{DRAW.choice('psour')}_{letters(36)}"),
    "GitHub, fine-grained": lambda: ("using {} now", f"github_pat_{letters(22)}_{letters(59)}"),
    "GitLab": lambda: ("clone with {}", f"glpat-{letters(20)}"),
    "Hugging Face": lambda: ("logged in as {}", f"hf_{letters(34)}"),
    "W&B, old": lambda: ("wandb login {}", hexadecimal(40)),
    "W&B, variable": lambda: ("WANDB_API_KEY={} python train.py", hexadecimal(40)),
    "W&B, new": lambda: ("key {}", f"wandb_v1_{letters(40)}"),
    "OpenAI": lambda: ("with {}", f"sk-proj-{letters(40)}"),
    "Anthropic": lambda: ("with {}", f"sk-ant-api03-{letters(60)}"),
    "AWS, id": lambda: ("as {}", f"AKIA{''.join(DRAW.choices(string.ascii_uppercase + '234567', k=16))}"),
    "AWS, secret": lambda: ("aws_secret_access_key = {}", coded(30)),
    "AWS, secret alone": lambda: ("found {} in it", coded(30)[:38] + "aB"),
    "AWS, signed": lambda: ("GET https://b.s3.test/k?X-Amz-Signature={}&b=1", hexadecimal(64)),
    "Azure, key": lambda: ("DefaultEndpointsProtocol=https;AccountKey={};x", coded(64)),
    "Azure, signature": lambda: ("https://a.blob.test/c?sv=2024&sig={}", letters(43)),
    "Google, key": lambda: ("maps {}", f"AIza{letters(35)}"),
    "Google, OAuth": lambda: ("as {}", f"ya29.{letters(60)}"),
    "Google, client": lambda: ("client {}", f"GOCSPX-{letters(28)}"),
    "Slack, token": lambda: ("post {}", f"xoxb-{letters(12, string.digits)}-{letters(24)}"),
    "Slack, hook": lambda: (
        "to https://hooks.slack.com/services/{}",
        f"T{letters(9).upper()}/B{letters(9).upper()}/{letters(24)}",
    ),
    "Discord, hook": lambda: ("https://discord.com/api/webhooks/123456789/{}", letters(68)),
    "Docker": lambda: ('"registry.test": {{"auth": "{}"}}', coded(18)),
    "npm": lambda: ("//registry:_authToken={}", f"npm_{letters(36)}"),
    "PyPI": lambda: ("upload {}", f"pypi-AgEIcHlwaS5vcmc{letters(60)}"),
    "Stripe": lambda: ("pay {}", f"sk_live_{letters(24)}"),
    "SendGrid": lambda: ("mail {}", f"SG.{letters(22)}.{letters(43)}"),
    "Databricks": lambda: ("host {}", f"dapi{hexadecimal(32)}"),
    "Vault": lambda: ("sealed by {}", f"hvs.{letters(24)}"),
    "Telegram": lambda: ("bot {}", f"{DRAW.randrange(10**8, 10**9)}:AA{letters(33)}"),
    "JWT": lambda: ("token {}", f"eyJ{letters(20)}.eyJ{letters(40)}.{letters(43)}"),
    "address": lambda: ("git clone https://ada:{}@host.test/x", letters(12)),
    "database": lambda: ("postgres://ada:{}@db.test/runs", letters(12)),
    "header": lambda: ("Authorization: Bearer {}", letters(30)),
    "option": lambda: ("run --api-token {} x", letters(20)),
    "curl": lambda: ("curl -s -u ada:{} https://host.test", letters(10)),
    "netrc": lambda: ("machine h login ada password {}", letters(10)),
    "key file": lambda: ("-----BEGIN OPENSSH PRIVATE KEY-----{}", coded(48)),
}
SECRETS = [(name, *make()) for _ in range(3) for name, make in KINDS.items()]
assert len(KINDS) >= 30
assert len(SECRETS) >= 100


# The folder of a person's files.
HOMES = "/home"


@pytest.mark.parametrize(("kind", "line", "secret"), SECRETS)
def test_no_credential_leaves(kind: str, line: str, secret: str) -> None:
    said = f"rank 0: {line.format(secret)}"
    for door in (leaving, HiddenNames(["a"]).text, last_lines):
        shown = door(said)
        assert secret not in shown
        assert secret[-12:] not in shown
    with pytest.raises(InputError, match="looks like a password, a token or a key"):
        demand_clean(said, "record")


PLAIN = (
    "step 12: loss 3.4512, 18,432 tokens/s, 1e-05",
    "sha256 5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef",
    "commit ae0ea18b3c93bd5f7bf63e6a6fc15e9a2f2a2ad7 of main",
    "torch 2.7.0+cu126, NCCL 2.26.2, driver 580.159.04, kernel 6.1.0-32-amd64",
    "model.blocks.0.attention.key_padding_mask_of_16_heads is float32",
    "hub: EleutherAI/gpt-neox-20b at 1234567890abcdef1234567890abcdef12345678",
    "tokens_per_step = 4096, per-token 0.5 ms; tokenizer tokenizer.json",
    "skip_first_batches_of_epoch_2 and keys.12.weight",
    "RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:3356, unhandled system error",
)


@pytest.mark.parametrize("line", PLAIN)
def test_what_tells_nothing_of_anybody_stays(line: str) -> None:
    assert HiddenNames(["a"]).text(line) == line
    demand_clean(line, "record")


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("node-17.cluster.example:29500 refused", "node-1:29500 refused"),
        ("connect to 10.1.2.3:29500", "connect to removed:29500"),
        ("via fe80::1c2d:3eff:fe4f:5a6b%eth0", "via removed%eth0"),
        ("2001:0db8:85a3:0000:0000:8a2e:0370:7334", "removed"),
        (f"of ada.lovelace in {HOMES}/ada.lovelace/runs/x", "of user in …/x"),
        ("~/secret-project/run.py", "…/run.py"),
        ("write to ada@example.org", "write to removed"),
        ("GET https://host.test/a/b?user=ada&x=1 failed", "GET https://host.test/a/b?*** failed"),
    ],
)
def test_what_names_the_user_is_hidden(monkeypatch: pytest.MonkeyPatch, said: str, shown: str) -> None:
    monkeypatch.setenv("USER", "ada.lovelace")
    assert HiddenNames(["node-17.cluster.example"]).text(said) == shown


def test_a_version_of_four_parts_is_no_address() -> None:
    libraries = {"nvidia-cudnn-cu12": "9.5.1.17"}
    found = {"libraries": libraries, "interfaces": [{"address": "10.0.0.7", "mtu": 9000}]}
    hidden = HiddenNames(["a"]).value(found)
    assert hidden["libraries"] == libraries
    assert hidden["interfaces"] == [{"address": "removed", "mtu": 9000}]
