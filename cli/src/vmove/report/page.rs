//! An account as a page that needs nothing else.

use maud::{DOCTYPE, PreEscaped, html};

use vmove_types::report::PhaseTime;
use vmove_types::units::format_bytes;

use super::account::{Account, Table, TimeLine, time};
use super::picture;

const STYLE: &str = "
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1f24;background:#fff}
svg{max-width:100%;height:auto}
table{border-collapse:collapse;margin:.5rem 0 1.5rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.2rem .8rem .2rem 0;border-bottom:1px solid #d1d9e0;vertical-align:top}
.wide{overflow-x:auto}
.bad{color:#b3261e}
@media (prefers-color-scheme:dark){body{color:#e6edf3;background:#15191e}th,td{border-color:#3a424b}.bad{color:#ff8f87}}
";

/// Writes it.
pub fn write(account: &Account) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (account.title) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                h1 { (account.title) }
                p class=[account.bad.then_some("bad")] { (account.standing) }
                // Its texts are escaped.
                (PreEscaped(picture::draw(account)))
                @if !account.facts.is_empty() {
                    table {
                        @for (name, value) in &account.facts {
                            tr { th scope="row" { (name) } td { (value) } }
                        }
                    }
                }
                @for line in &account.time_lines { (rows(&steps(line))) }
                @if !account.bytes.is_empty() { (rows(&amounts(&account.bytes))) }
                @for table in &account.tables { (rows(table)) }
            }
        }
    };
    page.into_string() + "\n"
}

/// The steps that the picture draws, for who cannot see it.
fn steps(line: &TimeLine) -> Table {
    let row = |step: &PhaseTime| vec![step.name.clone(), time(step.start_ms), time(step.duration_ms)];
    Table {
        title: format!("{}: {}", line.title, line.note),
        head: vec!["STEP", "BEGAN AT", "TIME"],
        rows: line.steps.iter().map(row).collect(),
    }
}

fn amounts(bytes: &[(String, u64)]) -> Table {
    let row = |(name, bytes): &(String, u64)| vec![name.clone(), format_bytes(*bytes), bytes.to_string()];
    Table {
        title: "Bytes".to_owned(),
        head: vec!["WHAT", "AMOUNT", "BYTES"],
        rows: bytes.iter().map(row).collect(),
    }
}

fn rows(table: &Table) -> PreEscaped<String> {
    html! {
        h2 { (table.title) }
        div class="wide" {
            table {
                thead { tr { @for name in &table.head { th scope="col" { (sentence(name)) } } } }
                tbody { @for row in &table.rows { tr { @for cell in row { td { (cell) } } } } }
            }
        }
    }
}

/// Capitals are for terminals.
fn sentence(name: &str) -> String {
    let mut chars = name.chars();
    chars.next().map(|first| first.to_string() + &chars.as_str().to_lowercase()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::account::tests::HOSTILE;
    use super::super::of_migration;
    use super::super::tests::finished;
    use super::*;

    #[test]
    fn it_needs_nothing_else() {
        let page = write(&of_migration::account(&finished()));
        assert!(
            page.starts_with("<!DOCTYPE html>")
                && page.contains("<svg")
                && page.contains("prefers-color-scheme:dark")
        );
        for outside in ["<script", "<link", "src=", "href=", "@import", "url("] {
            assert!(!page.contains(outside), "{outside}");
        }
        for part in [
            "Rounds",
            "Page faults",
            "P99.9",
            "The slowest page faults",
            "Dirtied/s",
            "Began at",
            ">switchover<",
            ">in rounds<",
        ] {
            assert!(page.contains(part), "{part}");
        }
    }

    #[test]
    fn a_hostile_name_is_text() {
        let mut progress = finished();
        HOSTILE.clone_into(&mut progress.vm);
        let vmove_types::progress::Outcome::Done { report } = &mut progress.outcome else { panic!() };
        for name in [
            &mut report.vm,
            &mut report.source,
            &mut report.fabric_reason,
            &mut report.slowest_faults[0].block,
        ] {
            HOSTILE.clone_into(name);
        }
        let page = write(&of_migration::account(&progress));
        assert!(!page.contains("<script") && page.contains("&lt;script&gt;"), "{page}");
    }
}
