//! Virtual clusters: a bridge with several daemons, and the commands that use the bridge.

mod barriers;
mod blueprints;
mod commands;
mod containers;
mod examples;
mod glue2;
mod grants;
mod guides;
mod machines;
mod networks;
mod page;
mod places;
mod plans;
mod requests;
mod ssh;
mod walks;
mod whole;
