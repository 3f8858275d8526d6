# shellcheck shell=bash
# ./run book: the documentation as a book, in target/book. Its page of commands is made from the programs themselves.

MDBOOK_VERSION=0.4.52

vmove_book() {
    local source
    check_cargo
    source=$(target_dir)/book-source
    rm -rf "$source"
    cp -r "$ROOT/docs" "$source"
    say "building the commands, for their page"
    (cd "$ROOT" && cargo build --quiet -p vmove-cli --bins)
    commands_page vmove vfork >"$source/commands.md"
    install_mdbook
    "$CACHE/mdbook/bin/mdbook" build "$source" --dest-dir "$(target_dir)/book"
    say "the book is in $(target_dir)/book/index.html"
}

install_mdbook() {
    [ -x "$CACHE/mdbook/bin/mdbook" ] && return
    say "installing mdbook $MDBOOK_VERSION below $CACHE"
    cargo install --quiet --locked --no-default-features --features search --root "$CACHE/mdbook" "mdbook@$MDBOOK_VERSION"
}

# commands_page PROGRAM...: what each command says of itself, as Markdown.
commands_page() {
    local program
    printf '# Commands\n\nMade from `--help` of each command. `vmove man DIR` writes the same as man pages.\n'
    for program in "$@"; do
        describe_command "$program"
    done
}

# describe_command PROGRAM [COMMAND...]: it, and all commands below it.
describe_command() {
    local help below
    help=$("$(target_dir)/debug/$1" "${@:2}" --help)
    printf '\n## `%s`\n\n```text\n%s\n```\n' "$*" "$help"
    while read -r below; do
        describe_command "$@" "$below"
    done < <(awk '/^Commands:$/ { listed = 1; next } /^[^ ]/ { listed = 0 } listed && /^  [a-z]/ && $1 != "help" { print $1 }' <<<"$help")
}

# Every page is in the book, and the book has no page that is not there.
book_is_whole() {
    local pages listed
    pages=$(cd "$ROOT/docs" && find . -name '*.md' ! -name SUMMARY.md | sed 's|^\./||' | sort)
    listed=$(sed -n 's/.*](\([^)]*\.md\)).*/\1/p' "$ROOT/docs/SUMMARY.md" | grep -vx 'commands.md' | sort)
    diff <(echo "$pages") <(echo "$listed") || {
        warn "docs/SUMMARY.md does not list the pages that there are (<: there, >: listed)"
        return 1
    }
}
