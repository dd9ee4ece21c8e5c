"""START HERE: the console script `lanekeeper`. Everything is imported inside `run`, so that a Ctrl-C during the imports
ends without a traceback too."""

import sys
from itertools import takewhile


def main() -> None:
    """The entry point of the console script `lanekeeper`."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line. Returns the exit code; every error is printed as one clear line."""
    # `--debug` is searched for before the command line is parsed, because the parsing itself may fail.
    debug = "--debug" in takewhile(lambda argument: argument.startswith("-"), arguments)
    try:
        from service.cli.commands import every

        every()(args=arguments, prog_name="lanekeeper")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        from service.cli.process import report

        return report(error, debug=debug)
    return 0


if __name__ == "__main__":
    main()
