//! `vmove fabric check`.

use crate::output::{End, say, say_json};
use vmove_client::Client;
use vmove_types::node::{FabricCheck, FabricTrial};
use vmove_types::problem::Exit;
use vmove_types::units::format_rate;

pub async fn check(client: &Client, to: &str, json: bool) -> Result<Exit, End> {
    let check = client.check_fabric(to).await?;
    let exit = if check.best.as_deref() == Some("verbs") { Exit::Done } else { Exit::Refused };
    if json {
        say_json(&check)?;
    } else {
        say(&describe(&check))?;
    }
    Ok(exit)
}

fn describe(check: &FabricCheck) -> String {
    let mut out = match &check.best {
        Some(best) => format!("{} reaches {} by {best}\n", check.node, check.to),
        None => format!("{} does not reach {} by any fabric\n", check.node, check.to),
    };
    if check.devices.is_empty() {
        out.push_str("  device   this node has no RDMA device\n");
    }
    for device in &check.devices {
        out.push_str(&format!("  device   {device}\n"));
    }
    for tried in &check.fabrics {
        out.push_str(&format!("  {:<8} {}\n", tried.fabric, found(tried)));
        if let Some(line) = multicast(tried) {
            out.push_str(&format!("           multicast {line}\n"));
        }
    }
    out
}

fn found(tried: &FabricTrial) -> String {
    match (tried.read_4k_p50_us, tried.read_4k_p99_us, tried.read_bytes_per_s) {
        (Some(p50), Some(p99), Some(rate)) => {
            format!("works: READ of 4 KiB in {p50:.1} us (99 %: {p99:.1} us), {}", format_rate(rate))
        }
        _ => format!("does not: {}", tried.problem.as_deref().unwrap_or("no reason was given")),
    }
}

fn multicast(tried: &FabricTrial) -> Option<String> {
    if let Some(why) = &tried.multicast_problem {
        return Some(format!("does not work: {why}"));
    }
    let (sent, lost, rate) = (tried.multicast_sent?, tried.multicast_lost?, tried.multicast_bytes_per_s?);
    let part = lost as f64 / sent.max(1) as f64 * 100.0;
    Some(format!("works: {part:.1} % of {sent} datagrams lost at {}", format_rate(rate)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_works_and_what_does_not_is_said() {
        let tcp = FabricTrial {
            fabric: "tcp".to_owned(),
            usable: true,
            read_4k_p50_us: Some(21.3),
            read_4k_p99_us: Some(60.0),
            read_bytes_per_s: Some(f64::from(1 << 30)),
            ..FabricTrial::default()
        };
        assert_eq!(multicast(&tcp), None);
        let some = FabricTrial {
            multicast_sent: Some(1000),
            multicast_lost: Some(5),
            multicast_bytes_per_s: Some(f64::from(1 << 22)),
            ..tcp.clone()
        };
        assert_eq!(multicast(&some).unwrap(), "works: 0.5 % of 1000 datagrams lost at 4.00 MiB/s");
        let verbs = FabricTrial {
            fabric: "verbs".to_owned(),
            problem: Some("No RDMA path to the peer".to_owned()),
            ..FabricTrial::default()
        };
        let check = FabricCheck {
            node: "a".to_owned(),
            to: "b".to_owned(),
            best: Some("tcp".to_owned()),
            fabrics: vec![verbs, tcp],
            ..FabricCheck::default()
        };
        let text = describe(&check);
        assert!(text.contains("a reaches b by tcp") && text.contains("no RDMA device"), "{text}");
        assert!(text.contains("does not: No RDMA path") && text.contains("21.3 us"), "{text}");
        assert!(text.contains("1.00 GiB/s"), "{text}");
    }
}
