//! Options of `migrate` that are about one of several VMs, and what all of them come to.

use std::str::FromStr;

use vmove_types::device::DeviceChoice;
use vmove_types::migration::MigrateRequest;
use vmove_types::spec::{Bandwidth, MigrationSpec, ModeRequest};

use super::vmove::Migrate;

/// A device for a role of a VM; of the only VM if it names none.
#[derive(Debug, Clone)]
pub struct DeviceOfMember {
    vm: Option<String>,
    choice: DeviceChoice,
}

impl FromStr for DeviceOfMember {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (vm, choice) = match text.split_once('=').and_then(|(head, _)| head.split_once(':')) {
            Some((vm, _)) => (Some(vm.to_owned()), &text[vm.len() + 1..]),
            None => (None, text),
        };
        let choice = choice.parse().map_err(|error| format!("{error}"))?;
        Ok(Self { vm, choice })
    }
}

/// `VM=SOMETHING`.
pub fn of_member(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((vm, what)) if !vm.is_empty() && !what.is_empty() => Ok((vm.to_owned(), what.to_owned())),
        _ => Err(format!("expected VM=…, found \"{text}\"")),
    }
}

/// `VM=MODE`.
pub fn mode_of_member(text: &str) -> Result<(String, ModeRequest), String> {
    let (vm, mode) = of_member(text)?;
    Ok((vm, mode.parse()?))
}

impl Migrate {
    /// One request for each VM: what was not given keeps its default.
    ///
    /// # Errors
    /// An option is about a VM that is not among them, or about none though there are several.
    pub fn requests(&self) -> Result<Vec<MigrateRequest>, String> {
        let named = self.to_of.iter().map(|(vm, _)| vm).chain(self.mode_of.iter().map(|(vm, _)| vm));
        let named = named.chain(self.devices.iter().filter_map(|device| device.vm.as_ref()));
        if let Some(stranger) = named.into_iter().find(|vm| !self.vms.contains(vm)) {
            return Err(format!("expected one of {}, found \"{stranger}\"", self.vms.join(", ")));
        }
        if let Some(device) = self.devices.iter().find(|device| device.vm.is_none() && self.vms.len() > 1) {
            let (vm, choice) = (&self.vms[0], &device.choice.0);
            return Err(format!(
                "expected --device VM:ROLE=PCI-ADDRESS for several VMs, such as {vm}:{choice}; found {choice}"
            ));
        }
        Ok(self.vms.iter().map(|vm| self.request(vm)).collect())
    }

    fn request(&self, vm: &str) -> MigrateRequest {
        let default = MigrationSpec::default();
        let of = |about: &String| about == vm;
        let devices = self.devices.iter().filter(|device| device.vm.as_ref().is_none_or(of));
        let options = MigrationSpec {
            mode: self.mode_of.iter().find(|(about, _)| of(about)).map_or(self.mode, |(_, mode)| *mode),
            max_downtime_ms: self.max_downtime.unwrap_or(default.max_downtime_ms),
            bandwidth: self.bandwidth.map(Bandwidth),
            paused: self.paused,
            verify: self.verify,
            timeout_ms: self.timeout.unwrap_or(default.timeout_ms),
            devices: devices.map(|device| device.choice.clone()).collect(),
            quiesce: self.quiesce.clone(),
            resume: self.resume.clone(),
            script_timeout_ms: self.script_timeout.unwrap_or(default.script_timeout_ms),
            unplug_timeout_ms: self.unplug_timeout.unwrap_or(default.unplug_timeout_ms),
        };
        let to = self.to_of.iter().find(|(about, _)| of(about)).map_or(&self.to, |(_, to)| to);
        MigrateRequest { vm: vm.to_owned(), to: to.clone(), options }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::vmove::{Cli, Command};

    fn migrate(words: &str) -> Migrate {
        let all = ["vmove", "migrate"].into_iter().chain(words.split_whitespace());
        match Cli::try_parse_from(all).unwrap().command {
            Command::Migrate(args) => args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_different_for_one_of_several_is_its_own() {
        let args = migrate(
            "a b --to n --mode hybrid --mode-of b=precopy --to-of b=m --device a:ib0=3b:00.1 --device b:ib0=3b:00.1",
        );
        let all = args.requests().unwrap();
        let told: Vec<_> = all.iter().map(|r| (r.vm.as_str(), r.to.as_str(), r.options.mode)).collect();
        assert_eq!(told, [("a", "n", ModeRequest::Hybrid), ("b", "m", ModeRequest::Precopy)]);
        assert!(all.iter().all(|request| request.options.devices.len() == 1));
        assert!(migrate("a --to n --device ib0=3b:00.1").requests().is_ok());
    }

    #[test]
    fn what_is_about_nobody_is_refused() {
        let why = |words| migrate(words).requests().unwrap_err();
        assert!(why("a b --to n --mode-of c=precopy").contains("expected one of a, b, found \"c\""));
        assert!(why("a b --to n --device ib0=3b:00.1").contains("such as a:ib0="));
        assert!(of_member("a").is_err() && mode_of_member("a=fast").is_err());
    }
}
