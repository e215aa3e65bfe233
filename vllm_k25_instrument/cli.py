"""The `vllm-k25` command."""

from __future__ import annotations

import typer

from vllm_k25_instrument.commands.analyze import analyze
from vllm_k25_instrument.commands.bench import bench
from vllm_k25_instrument.commands.campaign import campaign
from vllm_k25_instrument.commands.classify import classify
from vllm_k25_instrument.commands.compare import compare
from vllm_k25_instrument.commands.demo import demo
from vllm_k25_instrument.commands.doctor import doctor
from vllm_k25_instrument.commands.export import export
from vllm_k25_instrument.commands.patch import patch
from vllm_k25_instrument.commands.report import report
from vllm_k25_instrument.commands.top import top
from vllm_k25_instrument.commands.whatif import whatif

app = typer.Typer(
    name="vllm-k25",
    help="Where every microsecond of a vLLM decode step goes.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for command in (demo, doctor, top, export, report, analyze, compare, classify, whatif):
    app.command()(command)
app.add_typer(bench)
app.add_typer(campaign)
app.add_typer(patch)

if __name__ == "__main__":
    app()
