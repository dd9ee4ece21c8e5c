"""Reads the broker's users that `lanekeeper topology export` and `apply` are to create. Their passwords come from a
file; `export` creates missing passwords, and shows them once."""

import secrets
import sys
from pathlib import Path
from typing import get_args

import typer

from topology.export import SALT_BYTES, Role, User, hash_password
from topology.lanes import DEFAULT_LANES

DEFAULT = ("worker:worker", "operator:operator", "deployer:deployer")
"""The users that `topology export` creates if none are named. There is no user for an application among them, because
an operator must choose its name, which is also the second word of the application's routing keys."""
ROLES: dict[str, Role] = {role: role for role in get_args(Role)}


def read(given: list[str] | tuple[str, ...], passwords: Path | None) -> list[User]:
    """Read the users of `topology export` from options NAME:ROLE[:LANE,LANE…], and their passwords from the file
    `passwords`. A missing password is created. Raises typer.BadParameter."""
    known = {} if passwords is None else _passwords(passwords)
    return [_user(user, known) for user in given]


def with_passwords(given: list[str], passwords: Path | None) -> list[User]:
    """Read the users of `topology apply` from options NAME:ROLE[:LANE,LANE…]. Each must have a password in the file
    `passwords`, so that a repeated `apply` does not change it. Raises typer.BadParameter."""
    known = {} if passwords is None else _passwords(passwords)
    missing = [name for user in given if (name := user.partition(":")[0]) not in known]
    if missing:
        raise typer.BadParameter(f"a line NAME:PASSWORD is missing for {', '.join(missing)}", param_hint="--passwords")
    return [_user(user, known) for user in given]


def _user(text: str, known: dict[str, str]) -> User:
    name, _, rest = text.partition(":")
    role_name, _, lanes = rest.partition(":")
    role = ROLES.get(role_name)
    if role is None:
        raise typer.BadParameter(f"{text!r}: the role is one of {', '.join(ROLES)}", param_hint="--user")
    all_lanes = {lane.name for lane in DEFAULT_LANES}
    chosen = tuple(lanes.split(",")) if lanes else ()
    if not all_lanes.issuperset(chosen):
        raise typer.BadParameter(f"{text!r}: the lanes are {', '.join(sorted(all_lanes))}", param_hint="--user")
    password = known.get(name) or secrets.token_urlsafe(24)
    try:
        hashed = hash_password(password, salt=secrets.token_bytes(SALT_BYTES))
        user = User(name, role, hashed, chosen) if chosen else User(name, role, hashed)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--user") from None
    if name not in known:
        print(f"password of {name}, told this once: {password}", file=sys.stderr)
    return user


def _passwords(path: Path) -> dict[str, str]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}", param_hint="--passwords") from None
    if any(":" not in line or line.endswith(":") for line in lines):
        raise typer.BadParameter(f"{path}: every line is NAME:PASSWORD", param_hint="--passwords")
    return {name: password for name, _, password in (line.partition(":") for line in lines)}
