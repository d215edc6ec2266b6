"""Help of a command with many options, in groups with names."""

from typing import Any

from typer.core import TyperCommand


class GroupedCommand(TyperCommand):
    """A command whose `--help` lists each option below its `rich_help_panel`."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group, in the order of their first options."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                kind = f"{param.param_type_name.title()}s"
                group = getattr(param, "rich_help_panel", None) or kind
                sections.setdefault(group, []).append(record)
        for name, records in sections.items():
            with formatter.section(name):
                formatter.write_dl(records)
