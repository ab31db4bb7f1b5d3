"""`python -m ot_newton`: the command line."""


def main() -> int:
    """Run the command line and return its exit code."""
    from ot_newton.experiments.cli import main as run

    return run()


if __name__ == "__main__":
    raise SystemExit(main())
