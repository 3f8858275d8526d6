//! `vfork template`.

use std::path::PathBuf;
use std::sync::Arc;

use vmove_clone::CloneError;
use vmove_clone::record::{ForkPhase, ForkRecord};
use vmove_clone::template::{self, Saved, Template};
use vmove_migrate::clock::ms;
use vmove_migrate::vm::check_name;
use vmove_qmp::inspect::inspect_binary;

use super::Forks;
use super::problem::clone_problem;
use crate::api::forks::{Removed, TemplateInfo, TemplateList, TemplateRequest};
use crate::api::problem::{Code, Problem};
use crate::server::registry::{off_worker, store_problem};

impl Forks {
    fn saved_dir(&self, name: &str) -> PathBuf {
        self.saved.join(name)
    }

    /// Freezes a guest as it is now and writes it to disk while it runs on. The template stays in memory, too.
    pub async fn save_template(self: Arc<Self>, request: TemplateRequest) -> Result<TemplateInfo, Problem> {
        let TemplateRequest { vm, name } = request;
        check_name(&name).map_err(|e| store_problem(&e))?;
        let _busy = self.claim(&vm)?;
        let _name = if name == vm { None } else { Some(self.claim(&name)?) };
        let dir = self.saved_dir(&name);
        if dir.exists() || self.in_memory(&name).is_some() {
            let text = format!(
                "There is a template {name:?} already: choose another name, or `vfork template rm` it"
            );
            return Err(Problem::new(Code::NameTaken, text));
        }
        let id = uuid::Uuid::new_v4().simple().to_string();
        let (parent, ram) = self.parent(&id, &vm).await?;
        let frozen = self.freeze(&id, &parent, ram, Some(name.clone()), Vec::new()).await?;
        let (pause_ms, freeze) = (ms(frozen.pause), frozen.freeze);
        let (template, mut journal) = (frozen.template, frozen.journal);
        let work = move || {
            let saved = template::save(&template, &dir);
            let end = journal.update(|r: &mut ForkRecord| r.phase = ForkPhase::Complete);
            let _ = std::fs::remove_file(journal.path());
            end.map_err(|source| CloneError::Io {
                action: "write",
                path: journal.path().to_owned(),
                source,
            })?;
            if saved.is_err() {
                template.remove()?;
            }
            saved
        };
        let saved = off_worker(work).await?.map_err(|e| clone_problem(&e))?;
        tracing::info!(template = %name, vm = %vm, bytes = saved.bytes, pause_ms, "template saved");
        let mut info = info(&saved.manifest, true, Some(&saved));
        (info.parent_pause_ms, info.freeze) = (Some(pause_ms), Some(freeze));
        Ok(info)
    }

    /// Brings a template from disk into memory.
    pub async fn load_template(self: Arc<Self>, name: String) -> Result<TemplateInfo, Problem> {
        let _busy = self.claim(&name)?;
        if let Some(template) = self.in_memory(&name) {
            return Ok(info(template.manifest(), true, self.on_disk(&name).as_ref()));
        }
        let dir = self.saved_dir(&name);
        if !dir.is_dir() {
            return Err(unknown(&name));
        }
        let work = move || Saved::open(&dir);
        let saved = off_worker(work).await?.map_err(|e| clone_problem(&e))?;
        let made = &saved.manifest;
        same_qemu(&made.command_line, &made.qemu)
            .await
            .map_err(|why| clone_problem(&CloneError::Template { path: saved.dir.clone(), why }))?;
        let memory = self.registry.memory_dir.clone();
        let (loaded, from) = (saved.clone(), saved);
        let template =
            off_worker(move || template::load(&loaded, &memory)).await?.map_err(|e| clone_problem(&e))?;
        tracing::info!(template = %name, bytes = template.manifest().guest_bytes(), "template loaded");
        Ok(info(template.manifest(), true, Some(&from)))
    }

    /// All templates of this node.
    pub async fn templates(&self) -> Result<TemplateList, Problem> {
        let (memory, disk) = (self.registry.memory_dir.clone(), self.saved.clone());
        let (loaded, saved) = off_worker(move || (template::list(&memory), Saved::list(&disk))).await?;
        let mut all: Vec<TemplateInfo> = loaded
            .iter()
            .map(|t| {
                let on_disk = saved.iter().find(|s| s.manifest.name == t.manifest().name);
                info(t.manifest(), true, on_disk)
            })
            .collect();
        let only_saved = |s: &&Saved| loaded.iter().all(|t| t.manifest().name != s.manifest.name);
        all.extend(saved.iter().filter(only_saved).map(|s| info(&s.manifest, false, Some(s))));
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(TemplateList { templates: all })
    }

    /// Removes a template from memory and disk. Children that came from it keep what they map.
    pub async fn remove_template(self: Arc<Self>, name: String) -> Result<Removed, Problem> {
        let _busy = self.claim(&name)?;
        let (loaded, dir) = (self.in_memory(&name), self.saved_dir(&name));
        if check_name(&name).is_err() || (loaded.is_none() && !dir.exists()) {
            return Err(unknown(&name));
        }
        let work = move || {
            if let Some(template) = loaded {
                template.remove()?;
            }
            match std::fs::remove_dir_all(&dir) {
                Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                    Err(CloneError::Io { action: "remove", path: dir, source })
                }
                _ => Ok(()),
            }
        };
        off_worker(work).await?.map_err(|e| clone_problem(&e))?;
        Ok(Removed { name })
    }

    /// A template that can be forked.
    pub(super) fn loaded_template(&self, name: &str) -> Result<Template, Problem> {
        self.in_memory(name).ok_or_else(|| match self.on_disk(name) {
            Some(_) => Problem::new(
                Code::UnknownTemplate,
                format!(
                    "Template {name:?} is on disk only: `vfork template load {name}` brings it into memory"
                ),
            ),
            None => unknown(name),
        })
    }

    fn in_memory(&self, name: &str) -> Option<Template> {
        let all = template::list(&self.registry.memory_dir);
        all.into_iter().find(|t| t.manifest().name.as_deref() == Some(name))
    }

    fn on_disk(&self, name: &str) -> Option<Saved> {
        check_name(name).ok()?;
        Saved::open(&self.saved_dir(name)).ok()
    }
}

fn unknown(name: &str) -> Problem {
    let text = format!("No template {name:?} on this node: `vfork template list` shows those there are");
    Problem::new(Code::UnknownTemplate, text)
}

fn info(manifest: &template::Manifest, loaded: bool, saved: Option<&Saved>) -> TemplateInfo {
    TemplateInfo {
        name: manifest.name.clone().unwrap_or_default(),
        id: manifest.id.clone(),
        vm: manifest.vm.clone(),
        created: manifest.created,
        memory_bytes: manifest.guest_bytes(),
        qemu: manifest.qemu.clone(),
        loaded,
        saved: saved.is_some(),
        disk_bytes: saved.map_or(0, |s| s.bytes),
        parent_pause_ms: None,
        freeze: None,
    }
}

/// Device state is what one QEMU wrote for itself: another version may read it as something else. `wanted` wrote it; the program of
/// `command_line` is to read it.
pub(super) async fn same_qemu(command_line: &[String], wanted: &str) -> Result<(), String> {
    let program = command_line.first().cloned().unwrap_or_default();
    let path = if program.contains('/') {
        PathBuf::from(&program)
    } else {
        let path = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&path).map(|dir| dir.join(&program)).find(|p| p.is_file()).unwrap_or_default()
    };
    let host = inspect_binary(&path)
        .await
        .map_err(|error| format!("its QEMU {program} cannot be asked: {error}"))?;
    let wanted = wanted.split_whitespace().next().unwrap_or_default();
    let found = host.version.split([' ', '(']).next().unwrap_or_default();
    if wanted == found {
        return Ok(());
    }
    Err(format!(
        "it was made by QEMU {wanted}, {program} is {found} now: install that version, or make it again"
    ))
}
