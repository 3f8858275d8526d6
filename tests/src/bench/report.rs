//! Tables and JSON.

use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use serde::Serialize;
use vmove_guest::pattern::PAGE_BYTES;

use super::goals::Goal;
use super::measure::{Load, Outcome, Row};
use super::mover::Backing;
use crate::interrupt;
use crate::places::Qemu;

/// The machine and the settings of a measurement.
#[derive(Debug, Clone, Serialize)]
pub struct Setting {
    /// When, in UTC.
    pub date: String,
    /// Command that was run.
    pub command: String,
    /// Processor model and number of processors.
    pub machine: String,
    /// Kernel.
    pub kernel: String,
    /// QEMU's version.
    pub qemu: String,
    /// Load average over one minute, before the measurement.
    pub load_average: String,
    /// Parameters of QEMU's modes.
    pub parameters: String,
}

impl Setting {
    /// Begins a bench that writes into the folder `out`: makes that, cleans up if the bench is killed, and finds out where it runs.
    ///
    /// # Errors
    /// The folder cannot be made, or as [`Self::here`].
    pub fn begin(command: &str, parameters: &str, out: &Path) -> Result<Self> {
        interrupt::clean_up_when_killed()?;
        std::fs::create_dir_all(out).with_context(|| format!("could not make {}", out.display()))?;
        Self::here(command, &Qemu::under_test()?, parameters)
    }

    /// This machine and the current time. `command` is printed before the arguments of this program.
    ///
    /// # Errors
    /// When QEMU does not report its version.
    pub fn here(command: &str, qemu: &Path, parameters: &str) -> Result<Self> {
        let first_line = |program: &Path, arguments: &[&str]| -> Result<String> {
            let output = Command::new(program).args(arguments).output()?;
            let text = String::from_utf8_lossy(&output.stdout);
            Ok(text.lines().next().unwrap_or_default().to_owned())
        };
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let cpuinfo = read("/proc/cpuinfo");
        let model =
            cpuinfo.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("unknown processor");
        let cores = std::thread::available_parallelism().map_or(0, usize::from);
        let arguments = std::env::args().skip(1).collect::<Vec<_>>().join(" ");
        Ok(Self {
            date: first_line(Path::new("date"), &["-u", "+%Y-%m-%d %H:%M UTC"])?,
            command: format!("{command} {arguments}").trim().to_owned(),
            machine: format!("{cores} x {}", model.trim_start_matches([' ', '\t', ':'])),
            kernel: format!("Linux {}", read("/proc/sys/kernel/osrelease").trim()),
            qemu: first_line(qemu, &["--version"])?,
            load_average: read("/proc/loadavg").split(' ').next().unwrap_or_default().to_owned(),
            parameters: parameters.to_owned(),
        })
    }

    /// Writes what was measured into the folder `out`: `report` as NAME.json, `text` as NAME.md.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn write(&self, out: &Path, name: &str, report: &impl Serialize, text: &str) -> Result<()> {
        std::fs::write(out.join(format!("{name}.json")), serde_json::to_string_pretty(report)?)?;
        let head = format!("{}\n\n`{}`\n\n{}\n\n", self.line(), self.command, self.parameters);
        Ok(std::fs::write(out.join(format!("{name}.md")), head + text)?)
    }

    /// The same of cases and what came of each: a line of a table under `head` for each of them. Says what was written.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn write_cases<C: Serialize, O: Serialize>(
        &self,
        out: &Path,
        name: &str,
        cases: &[(C, O)],
        (head, line): (&str, impl Fn(&C, &O) -> String),
    ) -> Result<()> {
        let report = Cases { schema: 1, setting: self, cases };
        let lines: Vec<String> = cases.iter().map(|(case, outcome)| line(case, outcome)).collect();
        self.write(out, name, &report, &format!("{head}\n{}\n", lines.join("\n")))?;
        println!("\nwritten: {0}/{name}.json, {0}/{name}.md", out.display());
        Ok(())
    }

    /// Machine and time, in one line.
    #[must_use]
    pub fn line(&self) -> String {
        format!("{} | {} | {} | {}", self.date, self.machine, self.kernel, self.qemu)
    }
}

/// The content of the JSON file of a bench that measures cases.
#[derive(Serialize)]
struct Cases<'a, C, O> {
    schema: u32,
    setting: &'a Setting,
    cases: &'a [(C, O)],
}

/// How the program of `./run bench NAME` ends. An error is told.
#[must_use]
pub fn exit(name: &str, result: Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench {name}: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The content of the JSON file.
#[derive(Debug, Clone, Serialize)]
pub struct Report<'a> {
    /// Version of this format.
    pub schema: u32,
    /// The machine and the settings.
    pub setting: &'a Setting,
    /// All cases.
    pub rows: &'a [Row],
    /// The promises.
    pub goals: &'a [Goal],
}

const HEAD: [&str; 11] = [
    "mode",
    "total ms",
    "w/o start",
    "down ms",
    "lost work ms",
    "stall ms",
    "wire MiB",
    "in pages",
    "CPU s src+dst",
    "fault us p50/p99/max",
    "note",
];

/// The rows of one backing and load as a Markdown table.
#[must_use]
pub fn table(rows: &[Row], backing: Backing, load: Load) -> String {
    let mut lines = vec![HEAD.map(str::to_owned)];
    for row in rows.iter().filter(|row| row.case.backing == backing && row.case.load == load) {
        lines.push(cells(row));
    }
    aligned(&lines, &[0, 10])
}

/// A Markdown table; the first of `lines` is its head. The columns in `words` are aligned left, the others (figures) right.
pub(super) fn aligned<const N: usize>(lines: &[[String; N]], words: &[usize]) -> String {
    let width = |column: usize| lines.iter().map(|l| l[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    let mut text = String::new();
    for (number, line) in lines.iter().enumerate() {
        let padded: Vec<_> =
            line.iter()
                .zip(&widths)
                .enumerate()
                .map(|(column, (cell, width))| {
                    if words.contains(&column) {
                        format!("{cell:<width$}")
                    } else {
                        format!("{cell:>width$}")
                    }
                })
                .collect();
        let _ = writeln!(text, "| {} |", padded.join(" | "));
        if number == 0 {
            let rules: Vec<_> = widths.iter().map(|width| "-".repeat(*width)).collect();
            let _ = writeln!(text, "| {} |", rules.join(" | "));
        }
    }
    text
}

fn cells(row: &Row) -> [String; 11] {
    let label = row.case.mode.label().to_owned();
    let Some(o) = &row.median else {
        let why = row.failures.first().cloned().unwrap_or_default().replace(['\n', '|'], " ");
        let mut cells: [String; 11] = std::array::from_fn(|_| "-".to_owned());
        cells[0] = label;
        cells[10] = shorten(&why, 100);
        return cells;
    };
    let mut note = o.note.clone();
    if o.full_rate_ms.is_none() {
        note = format!("not back at full rate in time; {note}");
    }
    if let Some(after) = o.full_rate_after.filter(|_| o.is_disturbed()) {
        note = format!("DISTURBED: full rate {:.0}/s before, {after:.0}/s after; {note}", o.full_rate);
    }
    if o.guest_errors > 0 {
        note = format!("{} GUEST ERRORS; {note}", o.guest_errors);
    }
    if !row.failures.is_empty() {
        note =
            format!("{} of {} runs failed; {note}", row.failures.len(), row.failures.len() + row.runs.len());
    }
    [
        label,
        spread(row, |o| o.total_ms, 0),
        format!("{:.0}", o.total_without_start_ms),
        spread(row, |o| o.downtime_ms, 1),
        spread(row, |o| o.lost_work_ms, 0),
        format!("{:.0}", o.longest_stall_ms),
        mib(o.wire_bytes),
        (o.wire_bytes / PAGE_BYTES as u64).to_string(),
        format!("{:.2}+{:.2}", o.used.source_s, o.used.destination_s),
        o.faults
            .map_or_else(|| "-".to_owned(), |f| format!("{:.0}/{:.0}/{:.0}", f.p50_us, f.p99_us, f.max_us)),
        shorten(&note, 100),
    ]
}

/// Small amounts with a decimal.
#[expect(clippy::cast_precision_loss, reason = "bytes of a guest are below 2^53")]
fn mib(bytes: u64) -> String {
    let mib = bytes as f64 / f64::from(1 << 20);
    if mib < 100.0 { format!("{mib:.1}") } else { format!("{mib:.0}") }
}

/// The figure of the median run; with several runs also the smallest and the largest figure.
fn spread(row: &Row, figure: impl Fn(&Outcome) -> f64, digits: usize) -> String {
    let Some(median) = &row.median else { return "-".to_owned() };
    let own = format!("{:.digits$}", figure(median));
    if row.runs.len() < 2 {
        return own;
    }
    let all = || row.runs.iter().map(&figure);
    let (least, greatest) = (all().fold(f64::INFINITY, f64::min), all().fold(0.0, f64::max));
    format!("{own} ({least:.digits$}-{greatest:.digits$})")
}

pub(super) fn shorten(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars().take(most - 1).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::measure::Case;
    use crate::bench::mover::Mode;

    fn case() -> Case {
        Case {
            mode: Mode::QemuPrecopy,
            backing: Backing::Thp,
            load: Load::Steady,
            memory_mib: 1024,
            working_set_mib: 512,
            qemu: "qemu".into(),
            cold_memory: false,
        }
    }

    #[test]
    fn a_row_stands_for_its_median_run() {
        let run = |lost_work_ms| Ok(Outcome { lost_work_ms, ..Outcome::default() });
        let row = Row::new(case(), vec![run(30.0), run(10.0), Err(anyhow::anyhow!("it broke")), run(20.0)]);
        assert!((row.median.as_ref().expect("a median").lost_work_ms - 20.0).abs() < 1e-9);
        let text = table(&[row], Backing::Thp, Load::Steady);
        assert!(text.contains("QEMU pre-copy") && text.contains("1 of 4 runs failed"), "{text}");
        assert!(text.contains("20 (10-30)"), "{text}");
    }

    #[test]
    fn a_mode_that_is_refused_says_why() {
        let row = Row::new(case(), vec![Err(anyhow::anyhow!("not | with this\nguest"))]);
        let text = table(&[row], Backing::Thp, Load::Steady);
        assert!(text.contains("not   with this guest"), "{text}");
        assert_eq!(text.lines().count(), 3);
    }
}
