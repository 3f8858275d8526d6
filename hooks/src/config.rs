//! `[[hook]]`: as it is written, and checked.

#[cfg(test)]
mod reference;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use glob::Pattern;
use serde::Deserialize;
use serde_json::{Map, Value};
use vmove_types::{typo, units};

use crate::action::{Action, ForkCount, TemplateName, Where};
use crate::condition::{Fields, pattern};
use crate::own::Own;
use crate::rate::{AtMost, Rate};
use crate::trigger::{self, Trigger, Word};

/// The shortest time between two rounds of a timer.
const SHORTEST_ROUND: Duration = Duration::from_secs(1);
/// A name is part of the ids of forks.
const LONGEST_NAME: usize = 32;
const MOST_RETRIES: u32 = 100;

/// One `[[hook]]` as it is written.
#[derive(Debug, Clone, Deserialize)]
#[cfg_attr(test, derive(utoipa::ToSchema), schema(as = Hook))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct HookEntry {
    /// Small letters, digits and `-`, at most 32; no other hook of the node has it.
    name: String,
    /// The event.
    on: String,
    /// With `on = "file"`: the file that appears.
    #[serde(default)]
    #[cfg_attr(test, schema(value_type = Option<String>))]
    file: Option<PathBuf>,
    /// With `on = "timer"`: time between two rounds, such as `1h`.
    #[serde(default)]
    every: Option<String>,
    /// Conditions on the data of the event, by field.
    #[serde(default, rename = "where")]
    #[cfg_attr(test, schema(value_type = Object))]
    conditions: Map<String, Value>,
    /// Names of VMs, as patterns: one, or a list; all VMs, if it is not given.
    #[serde(default, rename = "for")]
    vms: OneOrMore,
    /// Labels that the VMs have, as patterns; all of them.
    #[serde(default)]
    labels: BTreeMap<String, String>,
    /// What is done.
    #[serde(rename = "do")]
    action: ActionEntry,
    /// Hooks of one event run from the lowest to the highest; 0, if it is not given.
    #[serde(default)]
    order: i32,
    /// How long an attempt may take, such as `10m`.
    #[serde(default)]
    time_limit: Option<String>,
    /// Attempts after one that failed, 0 to 100; 0, if it is not given.
    #[serde(default)]
    retries: u32,
    /// Time between two attempts; `5s`, if it is not given.
    #[serde(default)]
    retry_after: Option<String>,
    /// Runs for one VM, such as `3 in 1h`, or `unlimited`.
    #[serde(default)]
    at_most: Option<String>,
    /// Of a hook that may forbid: what its failure means.
    #[serde(default)]
    if_it_fails: Option<IfItFails>,
    /// Only say in the log what would be done.
    #[serde(default)]
    dry_run: bool,
}

/// One text, or a list of them.
#[derive(Debug, Clone, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize, utoipa::ToSchema), schema(as = Texts))]
#[serde(untagged, expecting = "expected a text, or a list of texts")]
enum OneOrMore {
    #[default]
    None,
    One(String),
    More(Vec<String>),
}

impl OneOrMore {
    fn list(self) -> Vec<String> {
        match self {
            Self::None => Vec::new(),
            Self::One(one) => vec![one],
            Self::More(more) => more,
        }
    }
}

/// `do` as it is written.
#[derive(Debug, Clone, Deserialize)]
#[cfg_attr(test, derive(utoipa::ToSchema), schema(as = Action))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
enum ActionEntry {
    /// Moves the VM.
    Migrate(MigrateEntry),
    /// Makes children on this node.
    Fork(ForkEntry),
    /// Saves a template.
    SaveTemplate(TemplateEntry),
    /// Stops the guest's processors.
    Pause,
    /// Runs a program: its path, and arguments.
    Run(Vec<String>),
}

/// Where the VM goes: one of the two.
#[derive(Debug, Clone, Default, Deserialize)]
#[cfg_attr(test, derive(utoipa::ToSchema), schema(as = Migrate))]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
struct MigrateEntry {
    /// A node, or a list of them: to the first that takes it.
    to: OneOrMore,
    /// The bridge plans where all VMs of this node go.
    by_bridge: bool,
}

#[derive(Debug, Clone, Deserialize)]
#[cfg_attr(test, derive(utoipa::ToSchema), schema(as = Fork))]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
struct ForkEntry {
    /// How many; 1, if it is not given.
    count: usize,
    /// They are loaded and do not run, until `vmove resume`; true, if it is not given.
    paused: bool,
}

impl Default for ForkEntry {
    fn default() -> Self {
        Self { count: 1, paused: true }
    }
}

#[derive(Debug, Clone, Deserialize)]
#[cfg_attr(test, derive(utoipa::ToSchema), schema(as = Template))]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
struct TemplateEntry {
    /// Its name; `{vm}-{time}`, if it is not given.
    name: String,
    /// Of those that this hook has made of the VM, so many of the newest stay; all, if it is not given.
    keep: Option<usize>,
}

impl Default for TemplateEntry {
    fn default() -> Self {
        Self { name: "{vm}-{time}".to_owned(), keep: None }
    }
}

/// What it means for whoever asked, if a hook that may forbid fails to give an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[cfg_attr(test, derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum IfItFails {
    /// It may go on, with a warning in the log.
    Allow,
    /// It is forbidden.
    Forbid,
}

/// A hook, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hook {
    /// Small letters, digits and `-`; unique on the node.
    pub name: String,
    /// What it waits for.
    pub on: Trigger,
    /// Conditions on the data.
    pub conditions: Fields,
    /// Names of its VMs; any of them. Empty for all.
    pub vms: Vec<Pattern>,
    /// Labels that its VMs have; all of them.
    pub labels: BTreeMap<String, Pattern>,
    /// What it does.
    pub action: Action,
    /// Hooks of one event run from the lowest to the highest.
    pub order: i32,
    /// How long an attempt may take.
    pub time_limit: Duration,
    /// Attempts after the first.
    pub retries: u32,
    /// Time between two.
    pub retry_after: Duration,
    /// The most runs for a VM.
    pub at_most: AtMost,
    /// Of a hook that may forbid.
    pub if_it_fails: IfItFails,
    /// It only says what it would do.
    pub dry_run: bool,
}

/// A hook that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("hook[{number}]{}.{key}: {why}", if .name.is_empty() { String::new() } else { format!(" ({})", .name) })]
pub struct HookError {
    /// Its place in the file, from 1.
    pub number: usize,
    /// Its name, as far as it has one.
    pub name: String,
    /// The key.
    pub key: String,
    /// What was expected and found.
    pub why: String,
}

/// Name of the hook that `child-start` in `[fork]` stands for.
const CHILD_START: &str = "child-start";

/// All `[[hook]]` of a file, checked, in the order in which they run; before them the program that `child-start` in `[fork]` names.
///
/// # Errors
/// The first that cannot be used.
pub fn check(entries: Vec<HookEntry>, child_start: Option<PathBuf>) -> Result<Vec<Hook>, HookError> {
    let mut hooks: Vec<Hook> = child_start.into_iter().map(Hook::child_start).collect();
    for (number, entry) in (1..).zip(entries) {
        let name = entry.name.clone();
        let in_place = |(key, why): (String, String)| HookError { number, name: name.clone(), key, why };
        if hooks.iter().any(|hook| hook.name == name) {
            return Err(in_place((
                "name".to_owned(),
                format!("expected a name that no other hook has, found \"{name}\""),
            )));
        }
        hooks.push(entry.checked().map_err(in_place)?);
    }
    hooks.sort_by_key(|hook| hook.order);
    Ok(hooks)
}

type Bad = (String, String);

fn bad(key: &str, why: impl Into<String>) -> Bad {
    (key.to_owned(), why.into())
}

impl Hook {
    /// What `child-start` in `[fork]` stands for.
    fn child_start(program: PathBuf) -> Self {
        let action = Action::Run { program, arguments: Vec::new() };
        Self {
            name: CHILD_START.to_owned(),
            on: Trigger::Own(Own::ChildStart),
            conditions: Fields::default(),
            vms: Vec::new(),
            labels: BTreeMap::new(),
            order: i32::MIN,
            // Longer than a hook that may forbid has otherwise: it makes networks.
            time_limit: action.usual_time_limit(false),
            action,
            retries: 0,
            retry_after: Duration::ZERO,
            at_most: AtMost::Unlimited,
            if_it_fails: IfItFails::Forbid,
            dry_run: false,
        }
    }
}

impl HookEntry {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    fn checked(self) -> Result<Hook, Bad> {
        checked_name(&self.name)?;
        let on = self.trigger()?;
        let conditions =
            Fields::read(&self.conditions).map_err(|(below, why)| bad(&format!("where.{below}"), why))?;
        let vms = self.vms.list().iter().map(|text| pattern(text)).collect::<Result<_, _>>();
        let vms = vms.map_err(|why| bad("for", why))?;
        let label = |(key, text): (String, String)| match pattern(&text) {
            Ok(pattern) => Ok((key, pattern)),
            Err(why) => Err(bad(&format!("labels.{key}"), why)),
        };
        let labels = self.labels.into_iter().map(label).collect::<Result<_, _>>()?;
        let action = self.action.checked(&on)?;
        let duration = |key: &str, text: Option<String>, usual: Duration| match text {
            None => Ok(usual),
            Some(text) => match units::parse_duration(&text) {
                Ok(Duration::ZERO) => Err(bad(key, "expected more than no time, found 0")),
                Ok(found) => Ok(found),
                Err(why) => Err(bad(key, why)),
            },
        };
        if self.retries > MOST_RETRIES {
            return Err(bad("retries", format!("expected at most {MOST_RETRIES}, found {}", self.retries)));
        }
        let may_forbid = on.is_asked();
        if may_forbid && self.retries > 0 {
            return Err(bad(
                "retries",
                format!("expected none on {on}: somebody waits for the answer, found {}", self.retries),
            ));
        }
        if self.if_it_fails.is_some() && !may_forbid {
            let why = "expected only with before-migration, before-fork and child-start: nobody waits for this hook";
            return Err(bad("if-it-fails", why));
        }
        let at_most = match self.at_most.as_deref() {
            None if matches!(on, Trigger::Timer(_)) || may_forbid => AtMost::Unlimited,
            None => AtMost::Rate(action.usual_rate()),
            Some("unlimited") => AtMost::Unlimited,
            Some(text) => AtMost::Rate(Rate::read(text).map_err(|why| bad("at-most", why))?),
        };
        let usual_verdict =
            if on == Trigger::Own(Own::ChildStart) { IfItFails::Forbid } else { IfItFails::Allow };
        Ok(Hook {
            time_limit: duration("time-limit", self.time_limit, action.usual_time_limit(may_forbid))?,
            retry_after: duration("retry-after", self.retry_after, Duration::from_secs(5))?,
            name: self.name,
            on,
            conditions,
            vms,
            labels,
            action,
            order: self.order,
            retries: self.retries,
            at_most,
            if_it_fails: self.if_it_fails.unwrap_or(usual_verdict),
            dry_run: self.dry_run,
        })
    }

    fn trigger(&self) -> Result<Trigger, Bad> {
        let word = trigger::word(&self.on).map_err(|why| bad("on", why))?;
        let is = |wanted: &str| matches!(word, Word::Host(host) if host == wanted);
        if self.file.is_some() && !is("file") {
            return Err(bad("file", format!("expected only with on = \"file\", found on = \"{}\"", self.on)));
        }
        if self.every.is_some() && !is("timer") {
            return Err(bad(
                "every",
                format!("expected only with on = \"timer\", found on = \"{}\"", self.on),
            ));
        }
        Ok(match word {
            Word::Qmp(name) => Trigger::Qmp(name),
            Word::Own(own) => Trigger::Own(own),
            Word::Host("file") => match &self.file {
                Some(path) if path.is_absolute() => Trigger::File(path.clone()),
                found => {
                    let found =
                        found.as_ref().map_or_else(|| "none".to_owned(), |path| path.display().to_string());
                    return Err(bad("file", format!("expected an absolute path, found {found}")));
                }
            },
            Word::Host("timer") => {
                let text = self.every.as_deref();
                let text = text.ok_or_else(|| bad("every", "expected a time such as 1h, found none"))?;
                let every = units::parse_duration(text).map_err(|why| bad("every", why))?;
                if every < SHORTEST_ROUND {
                    return Err(bad("every", format!("expected 1s or more, found {text}")));
                }
                Trigger::Timer(every)
            }
            Word::Host("gpu-xid") => Trigger::GpuXid,
            Word::Host("kernel-log") if self.conditions.is_empty() => {
                return Err(bad(
                    "where",
                    "expected a condition such as line = \"*Hardware Error*\", found none: it would run on every line",
                ));
            }
            Word::Host("kernel-log") => Trigger::KernelLog,
            Word::Host(_) => Trigger::MemoryError,
        })
    }
}

fn checked_name(name: &str) -> Result<(), Bad> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if name.is_empty() || name.len() > LONGEST_NAME || !name.chars().all(plain) {
        let why = format!("expected 1 to {LONGEST_NAME} of a to z, 0 to 9 and -, found \"{name}\"");
        return Err(bad("name", why));
    }
    Ok(())
}

impl ActionEntry {
    fn checked(self, on: &Trigger) -> Result<Action, Bad> {
        let may_forbid = on.is_asked();
        if may_forbid && !matches!(self, Self::Run(_)) {
            return Err(bad("do", format!("expected run on {on}: somebody waits for a program's answer")));
        }
        match self {
            Self::Pause => Ok(Action::Pause),
            Self::Migrate(MigrateEntry { to, by_bridge }) => match (to.list(), by_bridge) {
                (nodes, false) if !nodes.is_empty() => Ok(Action::Migrate(Where::Nodes(nodes))),
                (nodes, true) if nodes.is_empty() => Ok(Action::Migrate(Where::Bridge)),
                _ => Err(bad(
                    "do.migrate",
                    "expected either to = \"NODE\" (or a list, tried in turn) or by-bridge = true",
                )),
            },
            Self::Fork(ForkEntry { count: 0, .. }) => {
                Err(bad("do.fork.count", "expected 1 or more, found 0"))
            }
            Self::Fork(ForkEntry { count, paused }) => Ok(Action::Fork { count: ForkCount(count), paused }),
            Self::SaveTemplate(TemplateEntry { keep: Some(0), .. }) => {
                Err(bad("do.save-template.keep", "expected 1 or more, found 0"))
            }
            Self::SaveTemplate(TemplateEntry { name, keep }) => {
                let name = TemplateName::read(&name).map_err(|why| bad("do.save-template.name", why))?;
                Ok(Action::SaveTemplate { name, keep })
            }
            Self::Run(words) => {
                let program = words.first().map(PathBuf::from);
                let Some(program) = program.filter(|path| path.is_absolute()) else {
                    let found = words.first().map_or("none", String::as_str);
                    return Err(bad(
                        "do.run",
                        format!("expected the absolute path of a program and its arguments, found {found}"),
                    ));
                };
                Ok(Action::Run { program, arguments: words[1..].to_vec() })
            }
        }
    }
}

/// What the operator should know of hooks that can be used.
#[must_use]
pub fn warnings(hooks: &[Hook]) -> Vec<String> {
    let one = |hook: &Hook| {
        let of_event = match &hook.on {
            Trigger::Qmp(name) => trigger::unknown_qmp(name),
            _ => None,
        };
        let program = match &hook.action {
            Action::Run { program, .. } if !program.exists() => {
                Some(format!("{} is not there: the hook fails until it is", program.display()))
            }
            _ => None,
        };
        let tell = |text: String| format!("hook \"{}\": {text}", hook.name);
        of_event.into_iter().chain(program).map(tell).collect::<Vec<_>>()
    };
    hooks.iter().flat_map(one).collect()
}

/// The name in `known` that `name` was probably meant to be.
#[must_use]
pub fn nearest_hook<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    typo::nearest(name, known)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Deserialize)]
    struct File {
        hook: Vec<HookEntry>,
    }

    fn read(text: &str) -> Result<Vec<Hook>, HookError> {
        check(toml::from_str::<File>(text).unwrap().hook, None)
    }

    fn refused(text: &str) -> String {
        read(text).unwrap_err().to_string()
    }

    #[test]
    fn a_hook_of_each_kind_is_read() {
        let hooks = read(
            r#"
            [[hook]]
            name = "last"
            order = 5
            on = "after-migration"
            do = { run = ["/bin/true", "x"] }
            [[hook]]
            name = "evacuate"
            on = "MEMORY_FAILURE"
            where = { recipient = "hypervisor", flags.action-required = true }
            for = ["web-*", "db"]
            labels = { team = "ml" }
            do = { migrate = { to = ["node2", "node3"] } }
            retries = 2
            retry-after = "10s"
            at-most = "3 in 1h"
            [[hook]]
            name = "hourly"
            on = "timer"
            every = "1h"
            do = { save-template = { keep = 24 } }
            [[hook]]
            name = "copy"
            on = "GUEST_PANICKED"
            do = { fork = {} }
            [[hook]]
            name = "stop"
            on = "file"
            file = "/run/vmove/stop"
            do = "pause"
            "#,
        )
        .unwrap();
        let names: Vec<_> = hooks.iter().map(|hook| hook.name.as_str()).collect();
        assert_eq!(names, ["evacuate", "hourly", "copy", "stop", "last"]);
        assert_eq!(hooks[0].at_most, AtMost::Rate(Rate { count: 3, within: Duration::from_secs(3600) }));
        assert_eq!(hooks[1].at_most, AtMost::Unlimited);
        assert_eq!(hooks[2].action, Action::Fork { count: ForkCount(1), paused: true });
        assert_eq!(hooks[3].on, Trigger::File("/run/vmove/stop".into()));
    }

    #[test]
    fn what_cannot_be_used_is_named_with_key_and_expectation() {
        let hook = |rest: &str| format!("[[hook]]\nname = \"h\"\n{rest}");
        let run = "do = { run = [\"/bin/true\"] }";
        for (text, words) in [
            (
                format!("on = \"after-migraton\"\n{run}"),
                vec!["hook[1] (h).on: expected", "did you mean \"after-migration\"?"],
            ),
            (format!("on = \"memory_failure\"\n{run}"), vec!["did you mean \"MEMORY_FAILURE\"?"]),
            ("on = \"STOP\"\ndo = { migrate = {} }".to_owned(), vec![".do.migrate: expected either to"]),
            (
                "on = \"before-migration\"\ndo = \"pause\"".to_owned(),
                vec![".do: expected run on before-migration"],
            ),
            (
                "on = \"STOP\"\ndo = { run = [\"true\"] }".to_owned(),
                vec![".do.run: expected the absolute path", "found true"],
            ),
            (format!("on = \"timer\"\n{run}"), vec![".every: expected a time such as 1h, found none"]),
            (
                format!("on = \"timer\"\nevery = \"10ms\"\n{run}"),
                vec![".every: expected 1s or more, found 10ms"],
            ),
            (
                format!("on = \"file\"\nfile = \"x\"\n{run}"),
                vec![".file: expected an absolute path, found x"],
            ),
            (format!("on = \"STOP\"\nfile = \"/x\"\n{run}"), vec![".file: expected only with on = \"file\""]),
            (
                format!("on = \"STOP\"\nat-most = \"often\"\n{run}"),
                vec![".at-most: expected", "found \"often\""],
            ),
            (format!("on = \"STOP\"\ntime-limit = \"5\"\n{run}"), vec![".time-limit: ", "found \"5\""]),
            (
                format!("on = \"STOP\"\nwhere = {{ a = {{ at-least = true }} }}\n{run}"),
                vec![".where.a.at-least: expected a whole number"],
            ),
            (
                format!("on = \"STOP\"\nif-it-fails = \"forbid\"\n{run}"),
                vec![".if-it-fails: expected only with"],
            ),
            (
                format!("on = \"before-fork\"\nretries = 1\n{run}"),
                vec![".retries: expected none on before-fork"],
            ),
            (format!("on = \"kernel-log\"\n{run}"), vec![".where: expected a condition"]),
            (
                "on = \"timer\"\nevery = \"1h\"\ndo = { save-template = { name = \"x\" } }".to_owned(),
                vec![".do.save-template.name: expected {time}"],
            ),
        ] {
            let said = refused(&hook(&text));
            for word in words {
                assert!(said.contains(word), "{text}\n{said}");
            }
        }
        let twice = format!("{0}\n{0}", hook(&format!("on = \"STOP\"\n{run}")));
        assert!(refused(&twice).starts_with("hook[2] (h).name: expected a name that no other hook has"));
        assert!(
            refused(&hook(run).replace("\"h\"", "\"H h\"\non = \"STOP\""))
                .contains(".name: expected 1 to 32")
        );
    }

    #[test]
    fn unknown_qmp_events_and_missing_programs_are_warned_of() {
        let hooks = read(
            "[[hook]]\nname = \"a\"\non = \"MEMORY_FAILED\"\ndo = { run = [\"/not/there\"] }\n\
             [[hook]]\nname = \"b\"\non = \"MEMORY_FAILURE\"\ndo = \"pause\"",
        );
        let told = warnings(&hooks.unwrap());
        assert_eq!(told.len(), 2, "{told:?}");
        assert!(
            told[0].contains("MEMORY_FAILED is not known")
                && told[0].contains("did you mean MEMORY_FAILURE?"),
            "{told:?}"
        );
        assert!(told[1].contains("/not/there is not there"), "{told:?}");
    }
}
