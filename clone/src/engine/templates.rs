//! `vfork template`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::CloneError;
use crate::freeze::Frozen;
use crate::template::{self, Saved, Template};
use vmove_node::store::check_name;
use vmove_qmp::inspect::inspect_binary;
use vmove_types::time::{Mono, ms};

use super::ForkEngine;
use super::devices::Away;
use super::error::ForkError;
use super::origin::Guest;
use super::promote::Forked;
use vmove_node::blocking::run_blocking;
use vmove_types::fork::{
    ForkRequest, Removed, RestoreRequest, Restored, TemplateInfo, TemplateList, TemplateRequest,
};

impl ForkEngine {
    fn saved_dir(&self, name: &str) -> PathBuf {
        self.saved.join(name)
    }

    /// Freezes a guest as it is now and writes it to disk while it runs on. The template stays in memory, too.
    ///
    /// # Errors
    /// [`ForkError`].
    pub async fn save_template(self: Arc<Self>, request: TemplateRequest) -> Result<TemplateInfo, ForkError> {
        let begun = Mono::now();
        let parting = request.parting.parting().map_err(ForkError::Parting)?;
        let TemplateRequest { vm, name, let_run, .. } = request;
        check_name(&name)?;
        let _claim = self.claim_at_home(&vm).await?;
        let _name = if name == vm { None } else { Some(self.claim(&name)?) };
        let dir = self.saved_dir(&name);
        if dir.exists() || self.in_memory(&name).is_some() {
            return Err(ForkError::TemplateExists(name));
        }
        let id = uuid::Uuid::new_v4().simple().to_string();
        let mut away = self.stays_with_devices(&id, &vm, parting);
        let (frozen, forked, guest) = match self.freeze_without_devices(&id, &name, &mut away).await {
            Ok(frozen) => frozen,
            Err(error) => return Err(self.return_after(away, &id, error).await),
        };
        let ran_on = if let_run { self.let_run(&guest).await } else { None };
        let returned = self.return_devices(away).await;
        let (pause_ms, freeze) = (ms(frozen.pause), frozen.freeze);
        let (template, journal) = (frozen.template, frozen.journal);
        let work = move || {
            let saved = template::save(&template, &dir);
            if saved.is_err() {
                template.remove()?;
            }
            saved
        };
        let own_memory = async {
            match &forked {
                Some(forked) => self.rehome_after_fork(&id, forked).await,
                None => (None, None),
            }
        };
        // At the same time: a disk may need long for what memory does in a moment.
        let (saved, (own_memory, warning)) = tokio::join!(run_blocking(work), own_memory);
        self.end_journal(&vm, journal).await;
        let saved = saved??;
        tracing::info!(template = %name, vm = %vm, bytes = saved.bytes, pause_ms, "template saved");
        let mut info = info(&saved.manifest, true, Some(&saved));
        (info.parent_pause_ms, info.freeze) = (Some(pause_ms), Some(freeze));
        info.ran_on_ms = ran_on.map(|at| at.ms_since(begun));
        (info.devices, info.resume_problem) = (returned.devices, returned.resume_problem);
        (info.own_memory, info.warnings) = (own_memory, warning.into_iter().collect());
        Ok(info)
    }

    /// Freezes a guest for a template, once it has let its devices go.
    async fn freeze_without_devices(
        self: &Arc<Self>,
        id: &str,
        name: &str,
        away: &mut Away,
    ) -> Result<(Frozen, Option<Forked>, Guest), ForkError> {
        let (guest, ram) = self.guest(id, away).await?;
        self.detach_devices(away, &guest.record, &guest.client).await?;
        let forked = guest.forked(&ram);
        Ok((self.freeze(id, &guest, ram, Some(name.to_owned()), Vec::new()).await?, forked, guest))
    }

    /// Lets the guest of a template run again on this node, as it was when the template was made.
    ///
    /// # Errors
    /// [`ForkError`]: it does not run then, and the template is as it was.
    pub async fn restore_template(
        self: Arc<Self>,
        name: String,
        request: RestoreRequest,
    ) -> Result<Restored, ForkError> {
        let begun = Mono::now();
        let was_loaded = self.in_memory(&name).is_some();
        let template = self.clone().load_template(name.clone()).await?;
        let restored = self.clone().restore_loaded(&template, request, begun).await;
        if !was_loaded && let Some(loaded) = self.in_memory(&name) {
            // The guest maps what it needs of it.
            let removed = run_blocking(move || loaded.remove()).await;
            if let Err(error) = removed.map_err(|e| e.to_string()).and_then(|r| r.map_err(|e| e.to_string()))
            {
                tracing::warn!(template = %name, error, "a template that is not needed in memory stays there");
            }
        }
        restored
    }

    async fn restore_loaded(
        self: Arc<Self>,
        template: &TemplateInfo,
        request: RestoreRequest,
        begun: Mono,
    ) -> Result<Restored, ForkError> {
        let vm = request.vm.unwrap_or_else(|| template.vm.clone());
        let fork = ForkRequest {
            template: Some(template.name.clone()),
            count: 1,
            names: vec![vm.clone()],
            as_it_was: true,
            devices: request.devices,
            grants: request.grant.map(|grant| (vm.clone(), grant)).into_iter().collect(),
            ..ForkRequest::default()
        };
        let mut report = self.clone().create(fork).await?;
        let child = report.children.pop().unwrap_or_default();
        if let Some(why) = child.error {
            return Err(ForkError::NotRestored { vm, why });
        }
        let total_ms = ms(Mono::now().since(begun));
        let mut restored = Restored {
            template: template.name.clone(),
            created: template.created,
            child,
            total_ms,
            own_memory: None,
            warnings: report.warnings,
        };
        if restored.child.devices.is_empty() {
            match self.promote(vm.clone()).await {
                Ok(promoted) => restored.own_memory = promoted.own_memory,
                Err(error) => restored.warnings.push(format!(
                    "{vm:?} runs, but has no memory of its own yet: {}; it gets it when it is next moved or forked",
                    error.message()
                )),
            }
        }
        tracing::info!(template = %template.name, vm = %vm, total_ms, "a guest runs again as it was");
        Ok(restored)
    }

    /// Brings a template from disk into memory.
    ///
    /// # Errors
    /// [`ForkError`].
    pub async fn load_template(self: Arc<Self>, name: String) -> Result<TemplateInfo, ForkError> {
        let _claim = self.claim(&name)?;
        if let Some(template) = self.in_memory(&name) {
            return Ok(info(template.manifest(), true, self.on_disk(&name).as_ref()));
        }
        let dir = self.saved_dir(&name);
        if !dir.is_dir() {
            return Err(ForkError::UnknownTemplate(name));
        }
        let work = move || Saved::open(&dir);
        let saved = run_blocking(work).await??;
        let made = &saved.manifest;
        same_qemu(&made.command_line, &made.qemu, &saved.dir).await?;
        let memory = self.registry.memory_dir().to_owned();
        let (loaded, from) = (saved.clone(), saved);
        let template = run_blocking(move || template::load(&loaded, &memory)).await??;
        tracing::info!(template = %name, bytes = template.manifest().guest_bytes(), "template loaded");
        Ok(info(template.manifest(), true, Some(&from)))
    }

    /// All templates of this node.
    ///
    /// # Errors
    /// [`ForkError`].
    pub async fn templates(&self) -> Result<TemplateList, ForkError> {
        let (memory, disk) = (self.registry.memory_dir().to_owned(), self.saved.clone());
        let (loaded, saved) = run_blocking(move || (template::list(&memory), Saved::list(&disk))).await?;
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
    ///
    /// # Errors
    /// [`ForkError`].
    pub async fn remove_template(self: Arc<Self>, name: String) -> Result<Removed, ForkError> {
        let _claim = self.claim(&name)?;
        let (loaded, dir) = (self.in_memory(&name), self.saved_dir(&name));
        if check_name(&name).is_err() || (loaded.is_none() && !dir.exists()) {
            return Err(ForkError::UnknownTemplate(name));
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
        run_blocking(work).await??;
        Ok(Removed { name })
    }

    /// A template that can be forked.
    pub(super) fn loaded_template(&self, name: &str) -> Result<Template, ForkError> {
        self.in_memory(name).ok_or_else(|| match self.on_disk(name) {
            Some(_) => ForkError::TemplateOnDisk(name.to_owned()),
            None => ForkError::UnknownTemplate(name.to_owned()),
        })
    }

    fn in_memory(&self, name: &str) -> Option<Template> {
        let all = template::list(self.registry.memory_dir());
        all.into_iter().find(|t| t.manifest().name.as_deref() == Some(name))
    }

    fn on_disk(&self, name: &str) -> Option<Saved> {
        check_name(name).ok()?;
        Saved::open(&self.saved_dir(name)).ok()
    }
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
        ran_on_ms: None,
        freeze: None,
        roles: manifest.devices.iter().map(|one| one.device.request.role.clone()).collect(),
        devices: Vec::new(),
        resume_problem: None,
        own_memory: None,
        warnings: Vec::new(),
    }
}

/// Device state is what one QEMU wrote for itself: another version may read it as something else. `wanted` wrote it; the program of
/// `command_line` is to read it. `path`: the template's folder.
pub(super) async fn same_qemu(command_line: &[String], wanted: &str, path: &Path) -> Result<(), CloneError> {
    let refused = |why: String| CloneError::Template { path: path.to_owned(), why };
    let program = command_line.first().cloned().unwrap_or_default();
    let binary = if program.contains('/') {
        PathBuf::from(&program)
    } else {
        let path = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&path).map(|dir| dir.join(&program)).find(|p| p.is_file()).unwrap_or_default()
    };
    let host = inspect_binary(&binary)
        .await
        .map_err(|error| refused(format!("its QEMU {program} cannot be asked: {error}")))?;
    let wanted = wanted.split_whitespace().next().unwrap_or_default();
    let found = host.version.split([' ', '(']).next().unwrap_or_default();
    if wanted == found {
        return Ok(());
    }
    Err(refused(format!(
        "it was made by QEMU {wanted}, {program} is {found} now: install that version, or make it again"
    )))
}
