//! How long a guest's requests to its disks took, in words and cells.

use vmove_types::disk_latency::{DiskIo, DiskLatency, GaveWay, IoLatency};
use vmove_types::units::format_ms;

/// The share of requests for which a time is told, where QEMU kept a histogram.
const MOST: f64 = 0.99;

type Kind = (&'static str, fn(&DiskIo) -> Option<&IoLatency>);

const KINDS: [Kind; 3] = [
    ("reads", |io| io.reads.as_ref()),
    ("writes", |io| io.writes.as_ref()),
    ("flushes", |io| io.flushes.as_ref()),
];

/// Requests of a guest at this moment: `reads 0.12 ms, writes 1.50 ms`; nothing if it makes none.
pub fn present(io: &DiskIo) -> String {
    let told = |(name, of): Kind| of(io).map(|of| format!("{name} {}", time(of.mean_ms)));
    KINDS.into_iter().filter_map(told).collect::<Vec<_>>().join(", ")
}

/// What the guest's requests took, each kind that it made; nothing if nothing is known.
pub fn told(latency: &DiskLatency) -> Option<String> {
    let periods = periods(latency);
    if periods.iter().all(|(_, io)| io.is_none()) {
        return None;
    }
    let kinds = made(&periods).map(|(name, of)| {
        let told = |(period, io): &(&str, Option<&DiskIo>)| match io.map(of) {
            None => format!("unknown {period}"),
            Some(None) => format!("none {period}"),
            Some(Some(of)) => format!("{} {period} ({})", time(of.mean_ms), count(of)),
        };
        format!("{name} took {}", periods.iter().map(told).collect::<Vec<_>>().join(", "))
    });
    let mut kinds: Vec<String> = kinds.collect();
    kinds.extend(latency.gave_way.as_ref().map(gave_way));
    Some(if kinds.is_empty() { "the guest made no requests".to_owned() } else { kinds.join("; ") })
}

/// What a copy that gave way left to the guest, and what it cost itself.
fn gave_way(way: &GaveWay) -> String {
    let kept = format!("it kept {} of its pace while disks were copied", share(way));
    let held = way.held_back_ms;
    if held > 0.0 { format!("{kept}, which held them back for {}", format_ms(held)) } else { kept }
}

fn share(way: &GaveWay) -> String {
    format!("{:.0} %", way.kept_pace * 100.0)
}

/// Rows of a table with [`HEAD`]: one for each kind of requests that the guest made.
pub fn rows(disk: &str, latency: &DiskLatency) -> Vec<Vec<String>> {
    let periods = periods(latency);
    let row = |(name, of): Kind| {
        let mut cells = vec![disk.to_owned(), name.to_owned()];
        for (_, io) in periods {
            let (mean, count) = match io.map(of) {
                None => ("unknown".to_owned(), "?".to_owned()),
                Some(None) => ("none".to_owned(), "0".to_owned()),
                Some(Some(of)) => (time(of.mean_ms), of.requests.to_string()),
            };
            cells.extend([mean, count]);
        }
        let most = latency.during.as_ref().and_then(of).and_then(|of| of.within_ms(MOST));
        cells.push(most.map_or_else(|| "-".to_owned(), time));
        cells.push(latency.gave_way.as_ref().map_or_else(|| "-".to_owned(), share));
        cells
    };
    made(&periods).map(row).collect()
}

/// The columns of [`rows`].
pub const HEAD: [&str; 10] = [
    "DISK",
    "REQUESTS",
    "BEFORE",
    "COUNT",
    "DURING",
    "COUNT",
    "AFTER",
    "COUNT",
    "99 % DURING WITHIN",
    "PACE KEPT",
];

/// The kinds of requests that the guest made at any time.
fn made(periods: &Periods<'_>) -> impl Iterator<Item = Kind> {
    let in_any = |(_, of): &Kind| periods.iter().any(|(_, io)| io.is_some_and(|io| of(io).is_some()));
    KINDS.into_iter().filter(in_any)
}

type Periods<'a> = [(&'static str, Option<&'a DiskIo>); 3];

fn periods(latency: &DiskLatency) -> Periods<'_> {
    let DiskLatency { before, during, after, .. } = latency;
    [("before", before.as_ref()), ("during", during.as_ref()), ("after", after.as_ref())]
}

fn count(of: &IoLatency) -> String {
    let most = of.within_ms(MOST).map(|ms| format!(", 99 % within {}", time(ms)));
    format!("{}{}", of.requests, most.unwrap_or_default())
}

/// Requests may take some microseconds only.
fn time(ms: f64) -> String {
    if ms < 10.0 { format!("{ms:.2} ms") } else { format_ms(ms) }
}

#[cfg(test)]
mod tests {
    use vmove_types::disk_latency::LatencyBin;

    use super::*;

    fn writes(requests: u64, mean_ms: f64) -> DiskIo {
        let histogram = vec![LatencyBin { from_ms: 0.0, to_ms: Some(2.0), requests }];
        DiskIo { writes: Some(IoLatency { requests, mean_ms, histogram }), ..DiskIo::default() }
    }

    #[test]
    fn only_what_a_guest_did_is_told_and_what_is_unknown_is_no_zero() {
        assert_eq!(told(&DiskLatency::default()), None);
        let idle = DiskLatency { before: Some(DiskIo::default()), ..DiskLatency::default() };
        assert_eq!(told(&idle).as_deref(), Some("the guest made no requests"));
        assert!(rows("vda", &idle).is_empty());
        let latency = DiskLatency {
            before: Some(writes(8, 0.25)),
            during: Some(writes(100, 12.5)),
            after: Some(DiskIo::default()),
            gave_way: Some(GaveWay { kept_pace: 0.784, held_back_ms: 1500.0 }),
        };
        assert_eq!(
            told(&latency).as_deref(),
            Some(
                "writes took 0.25 ms before (8, 99 % within 2.00 ms), 12.5 ms during (100, 99 % within 2.00 ms), none after; it kept 78 % of its pace while disks were copied, which held them back for 1.50 s"
            )
        );
        let row = &rows("vda", &DiskLatency { before: None, ..latency })[0];
        assert_eq!(row[..6], ["vda", "writes", "unknown", "?", "12.5 ms", "100"]);
        assert_eq!((row.len(), row[9].as_str()), (HEAD.len(), "78 %"));
        assert_eq!(present(&writes(1, 1.0)), "writes 1.00 ms");
    }
}
