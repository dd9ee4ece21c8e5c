"""Look the locked packages up among known vulnerabilities: exit code 1 for one that is known, 3 if one could not be
looked up.

    .venv/bin/python .ci/tools.py audit .ci/audit.py [what pip-audit takes]

pip-audit ends with 1 for a vulnerability and for a network that is away, and with 0 where the service does not know a
package: what it wrote is judged here, not its exit code.
"""

import json
import subprocess
import sys
from pathlib import Path

LOCKS = ("requirements.lock", "requirements-dev.lock", "requirements-build.lock")
WITHIN_S = 120
"""Some 120 packages, a request each; a network that is away ends it at the first."""
SOCKET_S = 5
SHOWN = 3  # names of packages
SKIPPED = 3  # the exit code


def judge(out: str, err: str) -> tuple[int, str]:
    """The exit code and the line that tells of it."""
    try:
        packages = json.loads(out)["dependencies"]
    except (ValueError, KeyError, TypeError):
        why = err.strip().splitlines()[-1:] or ["pip-audit said nothing"]
        return SKIPPED, f"audit SKIPPED, nothing was looked up: {why[0][:200]}"
    known = [f"{each['name']} {each['version']}: {vuln['id']}" for each in packages for vuln in each.get("vulns", ())]
    if known:
        return 1, "audit FAILED, known vulnerabilities: " + "; ".join(known)
    unknown = [each["name"] for each in packages if "skip_reason" in each]
    if unknown:
        names = ", ".join(unknown[:SHOWN])
        return (
            SKIPPED,
            f"audit SKIPPED for {len(unknown)} of {len(packages)} packages ({names}, …): no data of them",
        )
    return 0, f"audit ok: no known vulnerability in {len(packages)} packages"


def main(more: list[str]) -> int:
    command = [str(Path(sys.executable).with_name("pip-audit")), "--disable-pip", "--require-hashes"]
    command += ["--format", "json", "--progress-spinner", "off", "--timeout", str(SOCKET_S)]
    for lock in LOCKS:
        command += ["--requirement", lock]
    try:
        done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=WITHIN_S, check=False)
        code, line = judge(done.stdout, done.stderr)
    except subprocess.TimeoutExpired:
        code, line = SKIPPED, f"audit SKIPPED: no answer within {WITHIN_S} s"
    print(line)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
