//! Everything about what is chosen, as text.

use vmove_types::units::format_bytes;

use super::board::{Board, Key, Kind};
use crate::output::fields;
use crate::vmove::report;

/// Lines of at most so many columns. What is gone meanwhile is said to be.
pub fn text(board: &Board, columns: u16) -> String {
    let Some(key) = &board.chosen else { return "Nothing is chosen".to_owned() };
    of(board, key, columns).unwrap_or_else(|| format!("{} is not here any more; Esc goes back", key.id))
}

fn of(board: &Board, key: &Key, columns: u16) -> Option<String> {
    let node = board.nodes.get(key.node)?;
    match key.kind {
        Kind::Vm => node.vms.iter().find(|vm| vm.name == key.id).map(|vm| {
            let word = |yes: bool| if yes { "yes" } else { "no" }.to_owned();
            let mut rows = vec![
                ("vm", vm.name.clone()),
                ("node", node.name.clone()),
                ("status", vm.status.clone()),
                ("memory", format!("{} ({})", format_bytes(vm.memory_bytes), vm.memory)),
                ("pid", vm.pid.to_string()),
                ("adopted", word(vm.adopted)),
            ];
            rows.extend(vm.devices.iter().map(|one| {
                let held = if one.held { "" } else { ", which it lacks" };
                ("device", format!("{}{held}", one.device.request.role))
            }));
            let more = [
                ("lease", &vm.lease),
                ("migration", &vm.migration),
                ("waits for", &vm.waiting),
                ("ended", &vm.why),
            ];
            rows.extend(more.into_iter().filter_map(|(name, value)| Some((name, value.clone()?))));
            fields(&rows)
        }),
        Kind::Migration => node.migration(&key.id).map(|progress| report::of_migration(progress, columns)),
        Kind::Fork => {
            node.forks.iter().find(|fork| fork.id == key.id).map(|fork| report::of_fork(fork, columns))
        }
    }
}
