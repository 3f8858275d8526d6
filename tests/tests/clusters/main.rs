//! Virtual clusters: a bridge over daemons, and the commands that speak with it.

mod blueprints;
mod commands;
mod plans;
