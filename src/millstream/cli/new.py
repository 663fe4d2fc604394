"""``millstream new``: a project with an app, its test, and what builds and checks it."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from string import Template

import click

from millstream.errors import ConfigError
from millstream.views.schema import check_app_name

FILES = {
    "app.py": "app.py",
    "test_app.py": "test_app.py",
    "pyproject.toml": "pyproject.toml",
    "Dockerfile": "Dockerfile",
    "README.md": "README.md",
    "wheels/README.md": "wheels.md",
    ".dockerignore": "dockerignore",
    ".gitignore": "gitignore",
    ".github/workflows/test.yml": "workflow.yml",
}
"""The files of a project, and the templates of which they are made."""


@click.command()
@click.argument("name")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="Where to make the project; by default in ./NAME.",
)
def new(name: str, folder: Path | None) -> None:
    """Make a project for an app called NAME: the app, its test, a Dockerfile, a CI file.

    Nothing that is there is changed: a folder that exists is refused.

    \b
    Examples:
      millstream new shop && cd shop && millstream dev app.py
      millstream new shop --folder /srv/shop
    """
    place = create_project(name, Path(name) if folder is None else folder)
    click.echo(f"{place} has {', '.join(FILES)}")
    click.echo(f"Next: cd {place} && millstream dev app.py")


def create_project(name: str, folder: Path) -> Path:
    """Make a project in a folder, which must not exist; return the folder.

    Raises:
        ConfigError: the name is none for an app, or the folder exists.
    """
    check_app_name(name)
    templates = files("millstream.cli") / "project"
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(
            f"{str(folder)!r} exists, and nothing in it is changed. Give another name, or another --folder."
        ) from None
    for name_of_file, template in FILES.items():
        text = (templates / f"{template}.template").read_text()
        path = folder / name_of_file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(Template(text).substitute(name=name))
    return folder
