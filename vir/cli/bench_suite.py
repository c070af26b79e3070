"""vir bench all: every benchmark of a GPU, one after the other."""

from pathlib import Path
from typing import Annotated

import typer

from vir.cli.bench import need_gpu
from vir.cli.figures import origin_of
from vir.cli.shared import console, fail


def bench_all(
    out: Annotated[
        Path, typer.Option(help="The folder for figures, pictures and a report of them.", file_okay=False)
    ] = Path("figures"),
    only: Annotated[list[str] | None, typer.Option(help="This run alone; repeat for several.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure anew what is there already.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs and their commands, and leave.")] = False,
) -> None:
    """Run every benchmark of a GPU, one after the other, and write a report. Killed, it goes on where it was."""
    from vir.bench import suite

    for name in only or ():
        if name not in suite.RUNS:
            fail(f"--only {name}: expected one of {', '.join(suite.RUNS)}.")
    names = only or list(suite.RUNS)
    if dry_run:
        for name in names:
            console.print(f"{name}: {suite.RUNS[name].shows}")
            console.print(f"  vir bench {suite.RUNS[name].arguments}", soft_wrap=True)  # to be copied
        return
    need_gpu("bench all")
    out.mkdir(parents=True, exist_ok=True)
    origin = origin_of("cuda", "bf16")
    failed = []
    for number, name in enumerate(names, 1):
        if not again and suite.finished(name, out, origin):
            console.print(f"{name}: is there already (--again measures it anew)")
        else:
            console.print(f"{name} ({number} of {len(names)}): {suite.RUNS[name].shows}")
            if not suite.measure(name, out):
                failed.append(name)
        (out / "report.md").write_text(suite.report(suite.RUNS, out))
    console.print(f"written to {out / 'report.md'}")
    if failed:
        fail(
            f"did not end well: {', '.join(failed)}. What they printed stands above; the same command tries them again."
        )
