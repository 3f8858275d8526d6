//! What the options of `migrate` come to: a request for each VM.

use vmove_types::migration::MigrateRequest;
use vmove_types::spec::{Bandwidth, MigrationSpec};

use super::vmove::Migrate;

impl Migrate {
    /// One request for each VM: what was not given keeps its default.
    ///
    /// # Errors
    /// An option is about a VM that is not among them, or about none though there are several.
    pub fn requests(&self) -> Result<Vec<MigrateRequest>, String> {
        let named = self.to_of.iter().map(|(vm, _)| vm).chain(self.mode_of.iter().map(|(vm, _)| vm));
        let named = named.chain(self.devices.iter().filter_map(|device| device.vm.as_ref()));
        let named = named.chain(self.grants.iter().filter_map(|grant| grant.vm.as_ref()));
        if let Some(stranger) = named.into_iter().find(|vm| !self.vms.contains(vm)) {
            return Err(format!("expected one of {}, found \"{stranger}\"", self.vms.join(", ")));
        }
        if let Some(device) = self.devices.iter().find(|device| device.vm.is_none() && self.vms.len() > 1) {
            let (vm, choice) = (&self.vms[0], &device.choice.0);
            return Err(format!(
                "expected --device VM:ROLE=PCI-ADDRESS for several VMs, such as {vm}:{choice}; found {choice}"
            ));
        }
        if self.vms.len() > 1 && self.grants.iter().any(|grant| grant.vm.is_none()) {
            let vm = &self.vms[0];
            return Err(format!(
                "expected --grant VM:GRANT for several VMs, such as {vm}:…; found one of no VM"
            ));
        }
        if let Some(place) = self.disks.which.disk_map.first().filter(|_| self.vms.len() > 1) {
            return Err(format!(
                "expected --disk-map for one VM, found {place} for {}: several would have the same file",
                self.vms.len()
            ));
        }
        Ok(self.vms.iter().map(|vm| self.request(vm)).collect())
    }

    fn request(&self, vm: &str) -> MigrateRequest {
        let default = MigrationSpec::default();
        let of = |about: &String| about == vm;
        let devices = self.devices.iter().filter(|device| device.vm.as_ref().is_none_or(of));
        let grant = self.grants.iter().find(|grant| grant.vm.as_ref().is_none_or(of));
        let options = MigrationSpec {
            mode: self.mode_of.iter().find(|(about, _)| of(about)).map_or(self.mode, |(_, mode)| *mode),
            max_downtime_ms: self.max_downtime.unwrap_or(default.max_downtime_ms),
            goals: self.goals.goals(),
            bandwidth: self.bandwidth.map(Bandwidth),
            paused: self.paused,
            verify: self.verify,
            // Whoever has a goal of ten minutes does not want it called off after two.
            timeout_ms: self.timeout.unwrap_or(default.timeout_ms.max(self.goals.within.unwrap_or(0))),
            devices: devices.map(|device| device.choice.clone()).collect(),
            head_start: self.head_start,
            grant: grant.map(|grant| grant.grant.clone()),
            quiesce: self.quiesce.clone(),
            resume: self.resume.clone(),
            script_timeout_ms: self.script_timeout.unwrap_or(default.script_timeout_ms),
            unplug_timeout_ms: self.unplug_timeout.unwrap_or(default.unplug_timeout_ms),
            disks: self.disks.which.disks.clone(),
            disk_map: self.disks.which.disk_map.clone(),
            disks_after: self.disks.which.disks_after,
            disk_pace: self.disks.disk_pace,
            source_disks: self.disks.source_disks,
            visit: default.visit,
            go_home: self.go_home.go_home(),
            ..default
        };
        let options = self.reads.in_options(options);
        let to = self.to_of.iter().find(|(about, _)| of(about)).map_or(&self.to, |(_, to)| to);
        MigrateRequest { vm: vm.to_owned(), to: to.clone(), options }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use vmove_types::disk::SourceDisks;
    use vmove_types::spec::{HeadStart, ModeRequest};

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
        migrate("a --to n --device ib0=3b:00.1").requests().unwrap();
        assert!(all.iter().all(|request| request.options.head_start == HeadStart::Auto));
        let all = migrate("a --to n --head-start never").requests().unwrap();
        assert_eq!(all[0].options.head_start, HeadStart::Never);
        let all = migrate("a b --to n --grant b:ey.x --grant a:ez.y").requests().unwrap();
        assert_eq!(all[0].options.grant.as_deref(), Some("ez.y"));
        assert_eq!(all[1].options.grant.as_deref(), Some("ey.x"));
    }

    #[test]
    fn goals_are_asked_for_and_the_timeout_lets_them() {
        let all = migrate("a --to n --max-pause 20ms --within 10m").requests().unwrap();
        let options = &all[0].options;
        assert_eq!((options.goals.max_pause_ms, options.goals.within_ms), (Some(20), Some(600_000)));
        assert_eq!(options.timeout_ms, 600_000);
        options.validate().unwrap();
        let all = migrate("a b --to n --host-cpu 50%").requests().unwrap();
        assert!(all.iter().all(|request| request.options.goals.host_cpu_percent == Some(50)));
        let all = migrate("a --to n --within 10m --timeout 1m").requests().unwrap();
        assert!(all[0].options.validate().unwrap_err().contains("goals contradict the options"));
    }

    #[test]
    fn a_guest_that_is_to_read_there_says_how_much_and_what_takes_it_home() {
        let all = migrate("a --to n --reads 2GiB --reads-near 1GiB --for 2h").requests().unwrap();
        let options = &all[0].options;
        assert_eq!((options.reads_bytes, options.reads_near_bytes_per_s), (Some(2 << 30), Some(1 << 30)));
        assert_eq!(options.go_home.after_ms, Some(7_200_000));
        options.validate().unwrap();
        let why = |words| migrate(words).requests().unwrap()[0].options.validate().unwrap_err();
        assert!(why("a --to n --reads 2GiB --mode precopy").contains("found a mode"));
        assert!(why("a --to n --reads 2GiB --within 10s").contains("found goals"));
        assert!(why("a --to n --for 2h").contains("go_home: expected"));
    }

    #[test]
    fn disks_that_move_are_listed() {
        let all = migrate("a --to n --disks vda,vdb --disk-map vdb=/dev/x --source-disks delete").requests();
        let options = &all.unwrap()[0].options;
        assert_eq!(options.disks, ["vda", "vdb"]);
        assert_eq!(options.disk_map[0].to_string(), "vdb=/dev/x");
        assert_eq!(options.source_disks, SourceDisks::Delete);
        assert_eq!(migrate("a --to n").requests().unwrap()[0].options.source_disks, SourceDisks::Keep);
    }

    #[test]
    fn what_is_about_nobody_is_refused() {
        let why = |words| migrate(words).requests().unwrap_err();
        assert!(why("a b --to n --mode-of c=precopy").contains("expected one of a, b, found \"c\""));
        assert!(why("a b --to n --grant ey.x").contains("such as a:…"));
        assert!(why("a b --to n --device ib0=3b:00.1").contains("such as a:ib0="));
        assert!(why("a b --to n --disks all --disk-map vda=/x").contains("for one VM"));
    }
}
