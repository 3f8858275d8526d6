//! `vmove lease`.

use std::time::Duration;

use super::input::bridge;
use super::show;
use crate::args::clusters::{LeaseAction, LeaseArgs};
use crate::output::{End, say_either};

/// Between two attempts while no bridge answers.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

pub async fn run(args: LeaseArgs, json: bool) -> Result<(), End> {
    let bridge = bridge(&args.at)?;
    match args.action {
        LeaseAction::List { holder } => {
            say_either(&bridge.leases(holder.as_deref()).await?, json, show::leases)
        }
        LeaseAction::Show { id } => say_either(&bridge.lease(&id).await?, json, show::lease),
        LeaseAction::Renew { id } => say_either(&bridge.renew_lease(&id).await?, json, show::lease),
        LeaseAction::Keep { id } => loop {
            let interval = match bridge.renew_lease(&id).await {
                Ok(lease) => Duration::from_millis(lease.ttl_ms / 3),
                Err(error) => {
                    let failure = crate::failure::Failure::from(error);
                    // The bridge may answer in time again. Only a bridge can say that the lease has ended.
                    if failure.exit_code != 5 {
                        return Err(failure.into());
                    }
                    RETRY_INTERVAL
                }
            };
            tokio::time::sleep(interval).await;
        },
        LeaseAction::Release { id } => say_either(&bridge.release_lease(&id).await?, json, |record| {
            format!("released after {:.4} GPU-hours", record.gpu_hours)
        }),
    }
}
