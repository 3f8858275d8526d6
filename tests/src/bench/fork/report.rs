//! Tables and JSON.

use std::fmt::Write as _;

use serde::Serialize;

use super::again::Series;
use super::hosts::Spreading;
use super::local::{Forks, Times};
use super::memory::{Memory, Share};
use super::qemu::{QemuForks, Recipe};
use crate::bench::goals::Goal;
use crate::bench::report::{Setting, aligned};
use crate::bench::spread::Spread;

/// Everything that was measured so far.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Version of this format.
    pub schema: u32,
    /// The machine and the settings.
    pub setting: Setting,
    /// The promises.
    pub goals: Vec<Goal>,
    /// vmove's forks on one host.
    pub forks: Vec<Forks>,
    /// Pauses of the 1 GiB guest while it was saved as a template, by round.
    pub saves_ms: Vec<f64>,
    /// Forks of one guest, one each second.
    pub again: Option<Series>,
    /// Memory of idle children.
    pub memory: Option<Memory>,
    /// The same with QEMU alone.
    pub qemu: Vec<QemuForks>,
    /// Forks to other hosts.
    pub hosts: Vec<Spreading>,
}

impl Report {
    /// A report without measurements.
    #[must_use]
    pub const fn new(setting: Setting) -> Self {
        Self {
            schema: 3,
            setting,
            goals: Vec::new(),
            forks: Vec::new(),
            saves_ms: Vec::new(),
            again: None,
            memory: None,
            qemu: Vec::new(),
            hosts: Vec::new(),
        }
    }

    /// Errors that vmove's children found in their memory. QEMU's own ways are reported as they are.
    #[must_use]
    pub fn guest_errors(&self) -> u64 {
        let forks: u64 = self.forks.iter().map(|forks| forks.guest_errors).sum();
        let forks = forks + self.again.as_ref().map_or(0, |series| series.guest_errors);
        forks + self.memory.as_ref().map_or(0, |memory| memory.guest_errors)
    }

    /// The whole report as Markdown.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = format!("{}\n\n`{}`\n", self.setting.line(), self.setting.command);
        text += "\nMilliseconds are medians of all rounds; minimum and maximum in parentheses.\n";
        let mut part = |title: &str, body: &str| {
            if !body.is_empty() {
                let _ = write!(text, "\n### {title}\n\n{body}");
            }
        };
        part("Forks on one host", &self.local());
        part("One guest forked again and again", &self.again.as_ref().map_or_else(String::new, again));
        part("fork against the same with QEMU alone", &self.beside());
        part("Memory of idle children, in MiB", &self.memory.as_ref().map_or_else(String::new, memory));
        part("Forks to other hosts, one child on each", &self.away());
        let goals: String = self.goals.iter().map(|goal| format!("- {}\n", goal.line())).collect();
        part("Promises", &goals);
        if self.guest_errors() > 0 {
            let _ =
                writeln!(text, "\n{} ERRORS were found by children in their memory.", self.guest_errors());
        }
        text
    }

    fn local(&self) -> String {
        let head = ["children", "QEMUs", "all running ms", "seen at work ms", "parent's pause ms"];
        let mut lines = vec![head.map(str::to_owned)];
        for forks in &self.forks {
            for (how, times) in ways(forks) {
                let what =
                    format!("{} of {} MiB ({} live)", forks.children, forks.memory_mib, forks.live_mib);
                lines.push([
                    what,
                    how.to_owned(),
                    figures(&times.all_running_ms, 0),
                    figures(&times.seen_ms, 0),
                    figures(&times.pause_ms, 1),
                ]);
            }
        }
        if !self.saves_ms.is_empty() {
            let pause = figures(&self.saves_ms, 1);
            let what = "`template save` of 1024 MiB".to_owned();
            lines.push([what, "-".to_owned(), "-".to_owned(), "-".to_owned(), pause]);
        }
        if lines.len() < 2 { String::new() } else { aligned(&lines, &[0, 1]) }
    }

    /// vmove and QEMU's recipes by the number of children, for numbers measured with both.
    fn beside(&self) -> String {
        let head = ["children", "way", "all running ms", "guest stopped ms", "afterwards", "MiB copied"];
        let mut lines = vec![head.map(str::to_owned)];
        let mut counts: Vec<usize> = self.qemu.iter().map(|forks| forks.children).collect();
        counts.sort_unstable_by(|x, y| y.cmp(x));
        counts.dedup();
        for count in counts {
            for qemu in self.qemu.iter().filter(|qemu| qemu.children == count) {
                lines.push(recipe(qemu));
            }
            let same = |forks: &&Forks| {
                forks.children == count && self.qemu.iter().any(|qemu| qemu.memory_mib == forks.memory_mib)
            };
            for forks in self.forks.iter().filter(same) {
                for (how, times) in ways(forks) {
                    lines.push([
                        count.to_string(),
                        format!("vmove, {how}"),
                        figures(&times.all_running_ms, 0),
                        figures(&times.pause_ms, 1),
                        "runs".to_owned(),
                        "0".to_owned(),
                    ]);
                }
            }
        }
        if lines.len() < 2 { String::new() } else { aligned(&lines, &[1, 4]) }
    }

    fn away(&self) -> String {
        let head =
            ["hosts", "way", "all running ms", "all memory there ms", "copies on the link", "verified"];
        let mut lines = vec![head.map(str::to_owned)];
        for s in &self.hosts {
            let verified = if s.loss > 0.0 { format!("{} of {}", s.verified, s.hosts) } else { "-".into() };
            lines.push([
                s.hosts.to_string(),
                s.label(),
                format!("{:.0}", s.all_running_ms),
                format!("{:.0}", s.complete_ms),
                format!("{:.3}", s.copies()),
                verified,
            ]);
        }
        if lines.len() < 2 { String::new() } else { aligned(&lines, &[1]) }
    }
}

/// One row for each fork, then the migrations.
fn again(series: &Series) -> String {
    let head = ["fork", "running ms", "answered ms", "stood still ms", "lost work ms", "longest stall ms"];
    let mut lines = vec![head.map(str::to_owned)];
    for (number, fork) in (1..).zip(&series.forks) {
        lines.push([
            number.to_string(),
            format!("{:.0}", fork.all_running_ms),
            format!("{:.0}", fork.answered_ms),
            format!("{:.1} ({:.1} of it frozen)", fork.stood_still_ms, fork.pause_ms),
            format!("{:.0}", fork.lost_work_ms),
            format!("{:.1}", fork.longest_stall_ms),
        ]);
    }
    let mut text = aligned(&lines, &[]);
    let _ = writeln!(
        text,
        "\n{} MiB, {} MiB of them written, {:.0} pages/s; one child each, one fork each second. Migration (hybrid): {} ms; right \
         after a fork: {} ms.",
        series.memory_mib,
        series.live_mib,
        series.pages_per_second,
        figures(&series.moves_ms, 0),
        figures(&series.moves_after_fork_ms, 0)
    );
    text
}

fn ways(forks: &Forks) -> [(&'static str, &Times); 2] {
    [("prepared", &forks.prepared), ("not prepared", &forks.cold)]
}

fn figures(all: &[f64], digits: usize) -> String {
    Spread::of(all).map_or_else(|| "-".to_owned(), |spread| spread.text(digits))
}

fn recipe(qemu: &QemuForks) -> [String; 6] {
    let copied = qemu.state_bytes as f64 / f64::from(1 << 20) * qemu.children as f64;
    let (afterwards, copied) = match qemu.recipe {
        Recipe::SaveCopyLoad => ("runs", format!("{copied:.0}")),
        Recipe::Templating => ("stays stopped", "0".to_owned()),
    };
    [
        qemu.children.to_string(),
        qemu.recipe.label().to_owned(),
        figures(&qemu.all_running_ms, 0),
        figures(&qemu.stopped_ms, 1),
        afterwards.to_owned(),
        copied,
    ]
}

/// One row for each child, one for what the host has only once, and the sums.
fn memory(memory: &Memory) -> String {
    let head = ["", "PSS", "of it template", "written since", "QEMU itself"];
    let mut lines = vec![head.map(str::to_owned)];
    let row = |name: &str, figures: [f64; 4]| {
        let [pss, template, written, qemu] = figures.map(|mib| format!("{mib:.1}"));
        [name.to_owned(), pss, template, written, qemu]
    };
    let share = |s: &Share| [s.pss_mib, s.template_mib, s.written_mib, s.qemu_mib];
    let mut sum = [0.0; 4];
    for child in &memory.children {
        lines.push(row(&child.name, share(child)));
        sum.iter_mut().zip(share(child)).for_each(|(sum, mib)| *sum += mib);
    }
    lines.push(row(&format!("all {}", memory.children.len()), sum));
    lines.push(row(&format!("{} (parent)", memory.parent.name), share(&memory.parent)));
    let mut text = aligned(&lines, &[0]);
    let _ = writeln!(
        text,
        "\nTemplates: {} of {:.0} MiB; the guest of {} MiB had {:.0} MiB in memory before the fork.\n\
         One template and {} children: {:.0} + {:.0} written + {:.0} QEMU = {:.0} MiB.\n\
         With the parent ({:.0} MiB of its own) and the daemon ({:.0} MiB): {:.0} MiB.\n\
         The host's available memory fell by {:.0} MiB.",
        memory.templates,
        memory.template_mib,
        memory.memory_mib,
        memory.guest_mib,
        memory.children.len(),
        memory.template_mib,
        sum[2],
        sum[3],
        memory.sum_mib(),
        memory.parent.own_mib(),
        memory.daemon_mib,
        memory.all_mib(),
        memory.fell_mib
    );
    text
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    fn forks(memory_mib: u32, children: usize, prepared: &[f64], cold: &[f64]) -> Forks {
        let times = |all: &[f64]| Times {
            all_running_ms: all.to_vec(),
            seen_ms: all.to_vec(),
            pause_ms: vec![5.0, 4.0, 20.0],
        };
        let (prepared, cold) = (times(prepared), times(cold));
        Forks { memory_mib, live_mib: memory_mib / 2, children, prepared, cold, guest_errors: 0 }
    }

    /// A report with some figures of each kind. One promise is not kept.
    pub(in crate::bench::fork) fn report() -> Report {
        let setting = Setting {
            date: "today".into(),
            command: "./run bench fork".into(),
            machine: "2 x".into(),
            kernel: "Linux".into(),
            qemu: "QEMU".into(),
            load_average: "0".into(),
            parameters: String::new(),
        };
        let share = |name: &str| Share {
            name: name.into(),
            pss_mib: 30.0,
            template_mib: 20.0,
            written_mib: 2.0,
            qemu_mib: 8.0,
        };
        let memory = Memory {
            memory_mib: 1024,
            guest_mib: 640.0,
            templates: 1,
            template_mib: 642.0,
            children: (1..=32).map(|n| share(&format!("idle.{n}"))).collect(),
            parent: share("idle"),
            daemon_mib: 15.0,
            fell_mib: 1000.0,
            guest_errors: 0,
        };
        let qemu = |recipe, children| QemuForks {
            recipe,
            memory_mib: 1024,
            children,
            all_running_ms: vec![7000.0],
            stopped_ms: vec![2600.0],
            copied_ms: vec![4000.0],
            state_bytes: 600 << 20,
        };
        Report {
            forks: vec![
                forks(1024, 32, &[181.0, 400.0, 211.0], &[1600.0, 1700.0, 1500.0]),
                forks(1024, 8, &[900.0], &[9000.0]),
                forks(256, 100, &[870.0], &[4000.0]),
            ],
            saves_ms: vec![4.5],
            memory: Some(memory),
            qemu: vec![
                qemu(Recipe::SaveCopyLoad, 8),
                qemu(Recipe::Templating, 8),
                qemu(Recipe::Templating, 32),
            ],
            ..Report::new(setting)
        }
    }

    #[test]
    fn each_child_has_a_row_and_the_template_counts_once() {
        let text = report().text();
        assert_eq!(text.lines().filter(|line| line.starts_with("| idle.")).count(), 32, "{text}");
        assert!(text.contains("642 + 64 written + 256 QEMU = 962 MiB"), "{text}");
        assert!(!text.contains("other hosts"), "{text}");
    }

    #[test]
    fn vmove_and_qemu_stand_together_by_the_number_of_children() {
        let text = report().beside();
        let rows: Vec<_> = text.lines().skip(2).map(|line| line.replace(' ', "")).collect();
        let counts: Vec<_> = rows.iter().map(|row| row.split('|').nth(1).unwrap_or_default()).collect();
        assert_eq!(counts, ["32", "32", "32", "8", "8", "8", "8"], "{text}");
        assert!(rows[1].contains("vmove,prepared|211(181-400)|5.0(4.0-20.0)|runs|0"), "{text}");
        assert!(rows[3].contains("loaded|7000(7000-7000)|2600.0(2600.0-2600.0)|runs|4800"), "{text}");
    }
}
