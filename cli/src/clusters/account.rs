//! `vmove account`.

use vmove_bridge_types::requests::AccountQuery;

use super::input::bridge;
use crate::args::clusters::AccountArgs;
use crate::output::{End, say};

pub async fn run(args: AccountArgs) -> Result<(), End> {
    let format = match (args.csv, args.apel) {
        (true, _) => "csv",
        (_, true) => "apel",
        _ => "jsonl",
    };
    let query = AccountQuery {
        format: Some(format.to_owned()),
        site: args.site,
        service: args.service,
        holder: args.holder,
        since_ms: args.since,
    };
    say(&bridge(&args.at)?.account(&query).await?)
}
