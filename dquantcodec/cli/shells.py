"""Completion scripts of bash, zsh and fish, from one description of the command line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .completion import Argument, Command

_BASH = """\
# Completion of dqkv for bash.
_dqkv() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} command= words= files= word at
    # --option=value comes as three words.
    if [[ $cur == = ]]; then
        cur=
    elif [[ $prev == = ]]; then
        prev=${{COMP_WORDS[COMP_CWORD-2]}}
    fi
    for ((at = 1; at < COMP_CWORD; at++)); do
        if [[ ${{COMP_WORDS[at]}} != -* ]]; then
            command=${{COMP_WORDS[at]}}
            break
        fi
    done
    case "$command $prev" in
{values}
    *)
        if [[ $cur == -* ]]; then
            case $command in
{options}
            esac
        else
            case $command in
{places}
            esac
        fi
        ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
    if [[ $files ]]; then
        while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen -f -- "$cur")
    fi
}}
complete -o filenames -F _dqkv dqkv
"""

_ZSH = """\
#compdef dqkv
# Completion of dqkv for zsh.
_dqkv() {{
    local curcontext=$curcontext state
    local -a line commands
    commands=(
{commands}
    )
    _arguments -C -A '-*' {options} '1:command:->command' '*::argument:->argument'
    case $state in
    command) _describe command commands ;;
    argument)
        case $words[1] in
{cases}
        esac
        ;;
    esac
}}
if [[ $funcstack[1] == _dqkv ]]; then
    _dqkv "$@"
else
    compdef _dqkv dqkv
fi
"""


def bash(commands: Sequence[Command]) -> str:
    rest = commands[1:]
    values = [
        (f"{command.name} {name}", argument)
        for command in rest
        for argument in command.arguments
        if argument.value
        for name in argument.names
    ]
    places = [(command.name, _place(command)) for command in rest]
    return _BASH.format(
        values=_cases(((f'"{at}"', *_offer(argument)) for at, argument in values), 4),
        options=_cases(((f'"{command.name}"', _names(command), False) for command in commands), 12),
        places=_cases(
            [('""', [command.name for command in rest], False), *((name, *_offer(place)) for name, place in places)], 12
        ),
    )


def _names(command: Command) -> list[str]:
    return [name for argument in command.arguments for name in argument.names]


def _offer(argument: Argument | None) -> tuple[Sequence[str], bool]:
    return (argument.words, argument.files) if argument else ((), False)


def _place(command: Command) -> Argument | None:
    """What stands where no option does; the positional arguments of a command are all of one kind."""
    return next((argument for argument in command.arguments if not argument.names), None)


def _cases(offers: Iterable[tuple[str, Sequence[str], bool]], indent: int) -> str:
    lines = []
    for pattern, words, files in offers:
        parts = [f"words={_quoted(' '.join(words))}"] * bool(words) + ["files=1"] * files
        lines.append(f"{' ' * indent}{pattern}) {'; '.join(parts) or ':'} ;;")
    return "\n".join(lines)


def zsh(commands: Sequence[Command]) -> str:
    top, *rest = commands
    cases = []
    for command in rest:
        options = [argument for argument in command.arguments if argument.names]
        place = _place(command)
        specifications = [_zsh_argument(argument) for argument in [*options, *([place] if place else [])]]
        cases.append(f"        {command.name})\n            _arguments \\")
        cases.append(" \\\n".join(f"                {text}" for text in specifications) + "\n            ;;")
    return _ZSH.format(
        commands="\n".join(f"        {_quoted(f'{command.name}:{command.help}')}" for command in rest),
        options=" ".join(map(_zsh_argument, top.arguments)),
        cases="\n".join(cases),
    )


def _zsh_argument(argument: Argument) -> str:
    text = argument.help.translate({ord(sign): f"\\{sign}" for sign in "[]:\\"})
    choices = "{compadd -- " + " ".join(argument.words) + "; _files}"
    if not argument.files:
        choices = f"({' '.join(argument.words)})" if argument.words else " "
    elif not argument.words:
        choices = "_files"
    if not argument.names:
        return _quoted(f"*:{text}:{choices}")
    value = f":value:{choices}" if argument.value else ""
    every = " ".join(argument.names)
    return " ".join(_quoted(f"({every}){name}[{text}]{value}") for name in argument.names)


def fish(commands: Sequence[Command]) -> str:
    top, *rest = commands
    lines = ["# Completion of dqkv for fish.", "complete -c dqkv -f"]
    lines += [f"complete -c dqkv {_fish_argument(argument)}" for argument in top.arguments]
    for command in rest:
        lines.append(
            f"complete -c dqkv -n __fish_use_subcommand -a {command.name} -d {_quoted(command.help, fish=True)}"
        )
        here = f"complete -c dqkv -n '__fish_seen_subcommand_from {command.name}' "
        known = [argument.names for argument in top.arguments]
        lines += [here + _fish_argument(argument) for argument in command.arguments if argument.names not in known]
    return "\n".join(lines) + "\n"


def _fish_argument(argument: Argument) -> str:
    parts = []
    for name in argument.names:
        parts.append(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}")
    if argument.names and argument.value:
        parts.append("-r")
    if argument.files:
        parts.append("-F")
    elif argument.value and argument.names:
        parts.append("-f")
    if argument.words:
        parts.append(f"-a {_quoted(' '.join(argument.words), fish=True)}")
    if argument.names:
        parts.append(f"-d {_quoted(argument.help, fish=True)}")
    return " ".join(parts)


def _quoted(text: str, fish: bool = False) -> str:
    """``text`` as one word of a shell."""
    if fish:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return "'" + text.replace("'", "'\\''") + "'"
