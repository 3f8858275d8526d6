# shellcheck shell=bash
# ./run book: the documentation as a book, in target/book. Its page of commands is made from the programs themselves.

MDBOOK_VERSION=0.4.52

vmove_book() {
    local source
    check_cargo
    source=$(target_dir)/book-source
    rm -rf "$source"
    cp -r "$ROOT/docs" "$source"
    lead_out_of_the_book "$source"
    say "building the commands, for their page"
    (cd "$ROOT" && cargo build --quiet --bins -p vmove-cli -p vmove-daemon -p vmove-bridge -p vmove-adapter -p vmove-fork)
    commands_page vmove vfork vmove-pve vmoved vbridged vmove-fork vmove-{slurm,network,podman,redfish}-adapter >"$source/commands.md"
    install_mdbook
    "$CACHE/mdbook/bin/mdbook" build "$source" --dest-dir "$(target_dir)/book"
    say "the book is in $(target_dir)/book/index.html"
}

install_mdbook() {
    [ -x "$CACHE/mdbook/bin/mdbook" ] && return
    say "installing mdbook $MDBOOK_VERSION below $CACHE"
    cargo install --quiet --locked --no-default-features --features search --root "$CACHE/mdbook" "mdbook@$MDBOOK_VERSION"
}

# lead_out_of_the_book FOLDER: links that leave docs/ lead to the repository. Copies of what they name would be files without a page around them,
# and of folders nothing could be shown. GitHub shows files and folders below blob/HEAD.
lead_out_of_the_book() {
    local repository
    repository=$(sed -n 's/^repository = "\(.*\)"$/\1/p' "$ROOT/Cargo.toml")
    sed -i "s|](\.\./|]($repository/blob/HEAD/|g" "$1"/*.md
    sed -i "s|](\.\./\.\./|]($repository/blob/HEAD/|g" "$1"/*/*.md
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

# Every relative link of a document leads to a file or folder that is there, and every #anchor to a heading of its page.
links_lead_somewhere() {
    local kind place path anchor dead=0
    local -A anchors=()
    while IFS=$'\t' read -r kind place path anchor; do
        if [ "$kind" = anchor ]; then
            anchors[$path#$anchor]=1
        elif [ "$path" = docs/commands.md ]; then
            : # `./run book` makes it.
        elif [ ! -e "$ROOT/$path" ]; then
            warn "$place links to $path, which is not there"
            dead=1
        elif [ -n "$anchor" ] && [ -z "${anchors[$path#$anchor]:-}" ]; then
            warn "$place links to #$anchor, which no heading of $path has"
            dead=1
        fi
    done < <(cd "$ROOT" && find README.md CHANGELOG.md qmp/README.md tests/lab/README.md docs -name '*.md' -print0 | xargs -0 awk "$LINKS_AND_ANCHORS" | sort -s -k 1,1)
    return $dead
}

# Of Markdown files, what links and headings say, with tabs in between: `anchor`, `-`, file, name, as GitHub makes it of the heading; and `link`,
# file:line, path from the root, anchor or nothing. What is between backticks is no link.
# shellcheck disable=SC2016
LINKS_AND_ANCHORS='
    function tell(kind, place, path, anchor) { print kind "\t" place "\t" path "\t" anchor }
    FNR == 1 { inside = 0; split("", times); folder = FILENAME; sub("[^/]*$", "", folder) }
    /^ *```/ { inside = !inside }
    inside { next }
    /^#+ / {
        name = tolower($0)
        sub(/^#+ +/, "", name)
        name = without_targets(name)
        gsub(/[^a-z0-9 _-]/, "", name)
        gsub(/ /, "-", name)
        tell("anchor", "-", FILENAME, name (times[name]++ ? "-" (times[name] - 1) : ""))
    }
    {
        rest = $0
        gsub(/`[^`]*`/, "", rest)
        while (match(rest, /<a id="[^"]*"/)) {
            tell("anchor", "-", FILENAME, substr(rest, RSTART + 7, RLENGTH - 8))
            rest = substr(rest, RSTART + RLENGTH)
        }
        while (match(rest, /\]\([^)]*\)/)) {
            target = substr(rest, RSTART + 2, RLENGTH - 3)
            rest = substr(rest, RSTART + RLENGTH)
            if (target ~ /^[a-z]+:/) continue
            anchor = target
            if (!sub(/^[^#]*#/, "", anchor)) anchor = ""
            sub(/#.*/, "", target)
            path = target == "" ? FILENAME : folder target
            while (sub(/[^\/]+\/\.\.\//, "", path)) {}
            sub(/\/$/, "", path)
            tell("link", FILENAME ":" FNR, path, anchor)
        }
    }
    # A heading that is a link is named by its text.
    function without_targets(text) {
        while (match(text, /\]\([^)]*\)/)) text = substr(text, 1, RSTART - 1) substr(text, RSTART + RLENGTH)
        return text
    }
'
