//! How far a fork is, on a terminal: a line for all children, and one below it for each other host.

use std::convert::Infallible;
use std::io::IsTerminal;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use vmove_spread::CHUNK;
use vmove_types::fork_report::{ForkProgress, HostProgress};

use super::PROGRESS_INTERVAL;
use crate::output::note;
use crate::waiting::{LINES_INTERVAL, PATIENCE};
use vmove_client::Client;
use vmove_types::units::format_bytes;

/// Shows a fork until it is dropped: lines every few seconds where standard error is no terminal, and nothing to programs.
pub async fn show(client: &Client, id: &str, count: usize, json: bool) -> Infallible {
    if json {
        return std::future::pending().await;
    }
    if !std::io::stderr().is_terminal() {
        return show_lines(client, id).await;
    }
    let mut lines = Lines::new(count);
    loop {
        tokio::time::sleep(PROGRESS_INTERVAL).await;
        if let Ok(progress) = client.fork_progress(id).await {
            lines.update(&progress);
        }
    }
}

/// The first one after a second: most forks are done by then.
async fn show_lines(client: &Client, id: &str) -> Infallible {
    tokio::time::sleep(PATIENCE).await;
    loop {
        if let Ok(progress) = client.fork_progress(id).await {
            note(&format!("vfork: {}", line(&progress)));
        }
        tokio::time::sleep(LINES_INTERVAL).await;
    }
}

struct Lines {
    all: MultiProgress,
    children: ProgressBar,
    hosts: Vec<ProgressBar>,
}

impl Lines {
    fn new(count: usize) -> Self {
        let all = MultiProgress::with_draw_target(ProgressDrawTarget::stderr_with_hz(10));
        let children = add(&all, count as u64, "{spinner} [{bar:24}] {wide_msg}");
        Self { all, children, hosts: Vec::new() }
    }

    fn update(&mut self, progress: &ForkProgress) {
        self.children.set_position(progress.running as u64);
        self.children.set_message(line(progress));
        let missing = progress.hosts.len().saturating_sub(self.hosts.len());
        self.hosts.extend((0..missing).map(|_| add(&self.all, 1, "  [{bar:24}] {wide_msg}")));
        for (bar, host) in self.hosts.iter().zip(&progress.hosts) {
            bar.set_length(u64::from(host.chunks.max(1)));
            bar.set_position(u64::from(here(host)));
            bar.set_message(host_line(host));
        }
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        self.hosts.iter().chain([&self.children]).for_each(ProgressBar::finish_and_clear);
    }
}

fn add(all: &MultiProgress, length: u64, template: &str) -> ProgressBar {
    let bar = all.add(ProgressBar::new(length));
    // A template that does not parse would be a mistake of ours; the plain bar does then.
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar
}

fn line(progress: &ForkProgress) -> String {
    let of = &progress.parent;
    match (progress.phase.as_str(), progress.keep, progress.rehome) {
        ("copy", Some(kept), _) => {
            format!("copy: {} % of the guest's memory", kept.pages * 100 / kept.of.max(1))
        }
        ("rehome", _, Some(done)) => {
            format!("rehome: {} % done of giving {of} memory of its own", done.bytes * 100 / done.of.max(1))
        }
        _ => format!(
            "{}: {} prepared, {} loaded, {} of {} running",
            progress.phase, progress.prepared, progress.loaded, progress.running, progress.children
        ),
    }
}

/// Chunks that a host has.
const fn here(host: &HostProgress) -> u32 {
    host.chunks.saturating_sub(host.missing)
}

fn host_line(host: &HostProgress) -> String {
    let mut parts = vec![
        format!("{}: {}", host.node, host.phase),
        format!("{} of {} running", host.running, host.children),
    ];
    if host.chunks > 0 {
        let bytes = |chunks: u32| format_bytes(u64::from(chunks) * u64::from(CHUNK));
        parts.push(format!("{} of {}", bytes(here(host)), bytes(host.chunks)));
    }
    if host.repaired > 0 {
        parts.push(format!("{} pieces repaired", host.repaired));
    }
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use vmove_types::fork_report::RehomeProgress;

    use super::*;

    #[test]
    fn the_line_of_a_host_has_children_bytes_and_losses() {
        let mut host = HostProgress {
            node: "n2".to_owned(),
            phase: "asked".to_owned(),
            children: 3,
            ..HostProgress::default()
        };
        assert_eq!(host_line(&host), "n2: asked, 0 of 3 running");
        "run".clone_into(&mut host.phase);
        (host.chunks, host.missing, host.running) = (1024, 256, 2);
        assert_eq!(host_line(&host), "n2: run, 2 of 3 running, 3.00 MiB of 4.00 MiB");
        host.repaired = 17;
        assert_eq!(host_line(&host), "n2: run, 2 of 3 running, 3.00 MiB of 4.00 MiB, 17 pieces repaired");
    }

    #[test]
    fn memory_that_is_moved_has_a_share_that_is_done() {
        let mut progress =
            ForkProgress { parent: "web".to_owned(), phase: "rehome".to_owned(), ..ForkProgress::default() };
        assert_eq!(line(&progress), "rehome: 0 prepared, 0 loaded, 0 of 0 running");
        progress.rehome = Some(RehomeProgress { bytes: 3 << 30, of: 4 << 30 });
        assert_eq!(line(&progress), "rehome: 75 % done of giving web memory of its own");
    }

    #[test]
    fn each_host_has_a_bar_as_long_as_its_template() {
        let mut lines = Lines::new(4);
        let host = |missing| HostProgress { chunks: 100, missing, ..HostProgress::default() };
        let mut progress = ForkProgress { running: 1, children: 4, ..ForkProgress::default() };
        lines.update(&progress);
        assert_eq!((lines.children.position(), lines.hosts.len()), (1, 0));
        for missing in [100, 40, 0] {
            progress.hosts = vec![host(missing), host(0), HostProgress::default()];
            lines.update(&progress);
            let bars: Vec<_> = lines.hosts.iter().map(|bar| (bar.position(), bar.length())).collect();
            assert_eq!(bars, [(100 - u64::from(missing), Some(100)), (100, Some(100)), (0, Some(1))]);
        }
    }
}
