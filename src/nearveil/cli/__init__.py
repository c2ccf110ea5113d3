"""The command line. Commands import the library when they run, so that help is quick."""

from typing import Annotated

import typer

import nearveil
from nearveil.cli import _audit, _budget, _index, _label, _mcp, _plan, _query, _server, _study, _token, _ui
from nearveil.cli._options import Command, make_app

app = make_app("Nearest-neighbour search with a privacy guarantee that you can check.", add_completion=True)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(nearveil.__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version


for _command in (_index.index, _query.query, _query.classify, _query.sync, _plan.plan):
    app.command(cls=Command)(_command)
app.add_typer(_budget.app, name="budget")
for _command in (_plan.cost, _plan.mechanisms, _server.protect, _server.serve):
    app.command(cls=Command)(_command)
app.add_typer(_token.app, name="token")
for _command in (_ui.ui, _mcp.mcp, _label.label, _label.train, _audit.audit, _study.study):
    app.command(cls=Command)(_command)
