//! The instance types, keys and aliases of the operators, from the files of `instance-types`; read again on SIGHUP.

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use sched_bridge::request::{Catalog, CatalogError, LARGEST_FILE, Source};
use tokio::signal::unix::{SignalKind, signal};

/// Most files.
const MOST_FILES: usize = 256;

/// Why the definitions cannot be used. Those that were in force before stay so.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TypesError {
    /// A pattern that is none.
    #[error(
        "instance-types {pattern:?}: {reason}; expected the path of a file, in which * stands for any text"
    )]
    Pattern {
        /// The pattern.
        pattern: String,
        /// Why.
        reason: String,
    },
    /// A file that cannot be read.
    #[error("{}: {reason}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why, and what was expected.
        reason: String,
    },
    /// Mistakes in the files.
    #[error("mistakes in files of instance-types:\n{0}")]
    Mistakes(#[from] CatalogError),
}

/// See the [module](self).
#[derive(Debug, Default)]
pub struct InstanceTypes {
    patterns: Vec<String>,
    current: RwLock<Arc<Catalog>>,
}

impl InstanceTypes {
    /// Reads the files that match these patterns.
    ///
    /// # Errors
    /// A file that cannot be read, and every mistake in the definitions.
    pub fn read(patterns: Vec<String>) -> Result<Self, TypesError> {
        let catalog = Arc::new(Catalog::read(&sources(&patterns)?)?);
        Ok(Self { patterns, current: RwLock::new(catalog) })
    }

    /// Those that are in force.
    #[must_use]
    pub fn current(&self) -> Arc<Catalog> {
        Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Reads the files again. Returns how many instance types there are now.
    ///
    /// # Errors
    /// As [`InstanceTypes::read`]; nothing has changed then.
    pub fn reload(&self) -> Result<usize, TypesError> {
        let catalog = Catalog::read(&sources(&self.patterns)?)?;
        let types = catalog.types().len();
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(catalog);
        Ok(types)
    }
}

/// On each SIGHUP, reads the files again.
pub async fn reload_on_hangup(types: Arc<InstanceTypes>) {
    let Ok(mut hangup) = signal(SignalKind::hangup()) else { return };
    while hangup.recv().await.is_some() {
        match types.reload() {
            Ok(types) => tracing::info!(types, "instance types are read again"),
            Err(error) => tracing::error!(%error, "instance types stay as they were"),
        }
    }
}

fn sources(patterns: &[String]) -> Result<Vec<Source>, TypesError> {
    let mut paths: Vec<PathBuf> = Vec::new();
    for pattern in patterns {
        let wrong = |reason: String| TypesError::Pattern { pattern: pattern.clone(), reason };
        let found = glob::glob(pattern).map_err(|error| wrong(error.to_string()))?;
        let mut any = false;
        for path in found {
            let path = path.map_err(|error| wrong(error.to_string()))?;
            any = true;
            // Two patterns may match one file.
            if !paths.contains(&path) {
                paths.push(path);
            }
        }
        if !any && !pattern.contains(['*', '?', '[']) {
            return Err(wrong("there is no such file".to_owned()));
        }
        if paths.len() > MOST_FILES {
            return Err(wrong(format!("more than {MOST_FILES} files")));
        }
    }
    paths.iter().map(|path| source(path)).collect()
}

fn source(path: &Path) -> Result<Source, TypesError> {
    let wrong = |reason: String| TypesError::File { path: path.to_owned(), reason };
    let about = std::fs::metadata(path).map_err(|error| wrong(error.to_string()))?;
    if !about.is_file() || about.len() > LARGEST_FILE as u64 {
        return Err(wrong(format!(
            "expected a file of at most {LARGEST_FILE} bytes, found {}",
            if about.is_file() { format!("{} bytes", about.len()) } else { "something else".to_owned() }
        )));
    }
    let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    Ok(Source { name: Some(path.display().to_string()), text })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_found_by_patterns_and_what_is_wrong_with_them_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        let write = |name: &str, text: &str| std::fs::write(at(name), text).unwrap();
        write("a.toml", "[types.a]\nrequest = \"vcpus=1; memory_mb=1\"\n");
        let types = InstanceTypes::read(vec![at("*.toml"), at("a.toml")]).unwrap();
        assert!(
            types.current().types().contains_key("a") && types.current().types().contains_key("m1.small")
        );
        // What is wrong changes nothing.
        write(
            "b.toml",
            "[types.b]\nrequest = \"a; colour=red\"\n[types.a]\nrequest = \"vcpus=2; memory_mb=1\"\n",
        );
        let error = types.reload().unwrap_err().to_string();
        assert!(error.contains("b.toml:1: type \"b\": ") && error.contains("colour"), "{error}");
        assert!(
            error.contains("b.toml:3: type \"a\" is defined in ") && error.contains("a.toml:1"),
            "{error}"
        );
        assert!(!types.current().types().contains_key("b"));
        write("b.toml", "[types.b]\nrequest = \"a; vcpus=2\"\n");
        types.reload().unwrap();
        assert!(types.current().types().contains_key("b"));

        let read = |pattern: String| InstanceTypes::read(vec![pattern]).unwrap_err().to_string();
        assert!(read(at("none.toml")).contains("no such file"));
        assert!(read(at("***")).contains("expected the path"));
        assert!(read(folder.path().display().to_string()).contains("found something else"));
        write("b.toml", &"#".repeat(LARGEST_FILE + 1));
        assert!(types.reload().unwrap_err().to_string().contains("at most 1048576 bytes"));
        std::fs::write(at("b.toml"), [0xff]).unwrap();
        assert!(types.reload().unwrap_err().to_string().contains("UTF-8"));
    }
}
