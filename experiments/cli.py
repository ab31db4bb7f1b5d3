"""`ot-newton COMMAND …`: names the commands, parses their options, and turns failures into one line and an exit code.

A command is a module of this folder named like it, with a frozen dataclass `Config`, a dictionary `PRESETS` of
configurations (empty where there are none), and `main(config) -> int`.

Exit codes: 0 done; 1 a file could not be written; 2 wrong input, nothing was computed from it; 130 interrupted.
"""

import contextlib
import difflib
import importlib
import io
import re
import sys
from types import ModuleType
from typing import Any

import tyro

import ot_newton
from ot_newton.experiments.errors import InputError, OutputError

COMMANDS = {
    "saddle-escape": "Adam caught in a saddle of a real shuffled regression, and Newton finishing in a few steps",
    "hessian-spectrum": "eigenvalues of the regression Hessian along a trajectory or at a saved point",
    "fit": "estimate W in y ≈ x W from two tables whose rows do not correspond (FCS or CSV)",
    "replicates": "calibrate two replicates of real cells without partners, and compare with the gains of the medians",
    "optimisers": "every method of minimize, and scipy's, on 46 functions: successes, false successes, costs",
    "passes": "passes over all pairs that responses, Hessians, potentials and whole runs take, beside plain solvers",
    "speed": "times, memory and errors over n and d, beside the other libraries that are installed",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after the program's name (default: those of the process).

    Returns:
        The exit code: 0 done, 1 output failed, 2 wrong input, 130 interrupted.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Greek letters must not end a run
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"ot-newton {ot_newton.__version__}")
        return 0
    name, *options = arguments
    if name not in COMMANDS:
        return _fail(2, f"unknown command {name!r}; {_suggestion(name, COMMANDS)}ot-newton --help lists the commands")
    try:
        module = importlib.import_module(f"ot_newton.experiments.{name.replace('-', '_')}")
        return module.main(_parse(name, module, options))
    except SystemExit as end:  # --help
        return int(end.code or 0)
    except InputError as error:
        return _fail(2, str(error))
    except OutputError as error:
        return _fail(1, str(error))
    except KeyboardInterrupt as interruption:
        return _fail(130, f"interrupted: {interruption}" if str(interruption) else "interrupted")


def _parse(name: str, module: ModuleType, options: list[str]) -> Any:
    """The configuration: the preset's, changed by the options."""
    default = module.PRESETS.get(_preset(options), tyro.MISSING_NONPROP)
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            return tyro.cli(
                module.Config,
                prog=f"ot-newton {name}",
                args=options,
                default=default,
                config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone),
            )
    except ValueError as error:
        raise InputError(str(error)) from error
    except SystemExit as end:
        if not end.code:
            raise
        raise InputError(f"{_summary(messages.getvalue())}; ot-newton {name} --help lists the options") from None


def _preset(options: list[str]) -> str | None:
    """The preset that is asked for; it decides what the other options default to."""
    for position, option in enumerate(options):
        if option.startswith("--preset="):
            return option.partition("=")[2]
        if option == "--preset" and position + 1 < len(options):
            return options[position + 1]
    return None


def _summary(box: str) -> str:
    """What a box under its title says first, and the options that it proposes, on one line."""
    lines = [line.strip("│╭╮╰╯ ") for line in box.splitlines()[1:]]
    paragraphs = [part.split() for part in re.split(r"^[-─]{3,}$", "\n".join(lines), flags=re.MULTILINE)]
    first, *others = [words for words in paragraphs if words]
    text = " ".join(first).rstrip(".").removeprefix("Error parsing Config: ")
    proposed = [word for words in others if words[0] == "Perhaps" for word in words if word.startswith("--")]
    return f"{text} (did you mean {' or '.join(proposed)}?)" if proposed else text


def _suggestion(word: str, words: Any) -> str:
    close = difflib.get_close_matches(word, list(words), n=1)
    return f"did you mean {close[0]}? " if close else ""


def _usage() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    return (
        "usage: ot-newton COMMAND [OPTIONS]\n\nNewton's method for optimal-transport losses.\n\n"
        f"{commands}\n\not-newton COMMAND --help lists the options of a command."
    )


def _fail(code: int, message: str) -> int:
    print(f"ot-newton: {message}", file=sys.stderr)
    return code
