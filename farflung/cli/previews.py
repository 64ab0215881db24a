"""farflung train --print-config and --dry-run: what would be trained, without training it."""

from __future__ import annotations

from farflung.cli.printing import working
from farflung.settings import Settings, settings_toml
from farflung.training.terminal import say


def print_config(settings: Settings) -> None:
    """The settings as a file that gives them again, in whatever run folder."""
    print(settings_toml(settings.changed(out="")), end="")


def dry_run(settings: Settings) -> None:
    """What would be trained, its size, bytes, memory and time. Raises UserError for what training would refuse."""
    with working("checking settings and model"):
        from farflung.planner.outlook import outlook
        from farflung.training.cautions import cautions
        from farflung.training.launch import check_settings, pick_device

        check_settings(settings.changed(network="internet") if settings.network.independent else settings)
        rows = outlook(settings, pick_device(settings.run.device, 0))
    for line in cautions(settings):
        say(line)
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:{width}}  {text}" for name, text in rows))
    print("nothing was trained; leave out --dry-run to begin")
