//! On which mount a folder is.

use std::path::{Path, PathBuf};

/// Modes of `huge=` in which a mapping that asks for huge pages gets them.
const HUGE: [&str; 3] = ["huge=advise", "huge=within_size", "huge=always"];

/// Kind and options of the mount on which a folder is, unless that is tmpfs with huge pages, as files of guest memory need it.
pub fn not_huge_tmpfs(dir: &Path) -> Option<String> {
    unless(dir, is_huge_tmpfs)
}

/// The same, unless it is hugetlbfs either.
pub fn not_on_huge_pages(dir: &Path) -> Option<String> {
    unless(dir, |kind, options| kind == "hugetlbfs" || is_huge_tmpfs(kind, options))
}

fn is_huge_tmpfs(kind: &str, options: &str) -> bool {
    kind == "tmpfs" && options.split(',').any(|option| HUGE.contains(&option))
}

fn unless(dir: &Path, good: impl Fn(&str, &str) -> bool) -> Option<String> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    match mount_of(&mounts, dir) {
        Some((kind, options)) if good(&kind, &options) => None,
        Some((kind, options)) => Some(format!("{kind} ({options})")),
        None => Some("nothing".to_owned()),
    }
}

/// Kind and options of the mount on which a folder is, also one that is not there yet.
fn mount_of(mountinfo: &str, dir: &Path) -> Option<(String, String)> {
    let mut found: Option<(PathBuf, (String, String))> = None;
    for line in mountinfo.lines() {
        let (before, after) = line.split_once(" - ")?;
        let at = PathBuf::from(before.split(' ').nth(4)?.replace("\\040", " "));
        let mut after = after.split(' ');
        let (kind, options) = (after.next()?, after.nth(1)?);
        // Of two mounts at one place the later one counts.
        let nearer =
            found.as_ref().is_none_or(|(known, _)| at.components().count() >= known.components().count());
        if dir.starts_with(&at) && nearer {
            found = Some((at, (kind.to_owned(), options.to_owned())));
        }
    }
    found.map(|(_, found)| found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_mount_counts() {
        let info =
            "1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:1 / /mem rw shared:1 - tmpfs tmpfs rw,huge=advise\n";
        let kind = |dir: &str| mount_of(info, Path::new(dir)).unwrap().0;
        assert_eq!(kind("/mem/libvirt"), "tmpfs");
        assert_eq!(kind("/memory"), "ext4");
    }

    #[test]
    fn tmpfs_is_good_with_huge_pages_only() {
        assert!(is_huge_tmpfs("tmpfs", "rw,huge=advise"));
        assert!(!is_huge_tmpfs("tmpfs", "rw") && !is_huge_tmpfs("hugetlbfs", "rw,pagesize=2M"));
    }
}
