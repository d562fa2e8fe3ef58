//! The choice of the files of a repository that make up a model.

use anyhow::{Result, bail};

use crate::catalog::reference::is_sound_path;

/// Small files that are pulled with a safetensors model if the repository has them.
const COMPANIONS: [&str; 10] = [
    "config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "preprocessor_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
];
/// Most files that a model is split into.
const MAX_PARTS: usize = 999;

/// The files of a repository that have to be pulled.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// A model in one file, or in the parts of a split one. The first is the model's path.
    Files(Vec<String>),
    /// A folder of weights with their companions.
    Folder(Vec<String>),
}

impl Choice {
    /// Returns the choice of one file, with the other parts if it is a part of a split model.
    pub(super) fn of_file(file: &str) -> Result<Choice> {
        let Some(part) = Part::parse(file) else { return Ok(Choice::Files(vec![file.to_owned()])) };
        if !(1..=MAX_PARTS).contains(&part.count) || !(1..=part.count).contains(&part.number) {
            bail!("{file} claims to be part {} of {}, which is impossible", part.number, part.count);
        }
        Ok(Choice::Files((1..=part.count).map(|number| part.named(number)).collect()))
    }

    /// Returns the paths of the files within the repository.
    pub(super) fn files(&self) -> &[String] {
        let (Choice::Files(files) | Choice::Folder(files)) = self;
        files
    }
}

/// A part of a split GGUF file, named `STEM-00001-of-00003.gguf`.
struct Part<'a> {
    stem: &'a str,
    number: usize,
    count: usize,
}

impl<'a> Part<'a> {
    fn parse(file: &'a str) -> Option<Self> {
        let (rest, count) = file.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let digits = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
        (digits(number) && digits(count))
            .then(|| Some(Part { stem, number: number.parse().ok()?, count: count.parse().ok()? }))?
    }

    fn named(&self, number: usize) -> String {
        format!("{}-{number:05}-of-{:05}.gguf", self.stem, self.count)
    }
}

/// Chooses among the files of a repository: its only GGUF model, or its safetensors.
pub(super) fn choose(repository: &str, files: &[String]) -> Result<Choice> {
    // The names come from outside, and become paths.
    let files: Vec<_> = files.iter().filter(|file| is_sound_path(file)).collect();
    let first_of_model = |file: &str| Part::parse(file).is_none_or(|part| part.number == 1);
    let models: Vec<_> = files
        .iter()
        .filter(|file| file.ends_with(".gguf") && first_of_model(file))
        .map(|file| file.as_str())
        .collect();
    if let [only] = models.as_slice() {
        return Choice::of_file(only);
    }
    let weights = files.iter().filter(|file| file.ends_with(".safetensors") && !file.contains('/'));
    let companions = files.iter().filter(|file| COMPANIONS.contains(&file.as_str()));
    let folder: Vec<String> = companions.chain(weights).map(|file| (*file).clone()).collect();
    if folder.iter().any(|file| file.ends_with(".safetensors"))
        && folder.iter().any(|file| file == "config.json")
    {
        return Ok(Choice::Folder(folder));
    }
    if models.is_empty() {
        bail!("the model {repository} has neither a .gguf file nor safetensors with a config.json");
    }
    bail!(
        "the model {repository} has several .gguf files\n  hint: choose one with hf:{repository}:FILE, where FILE is one of {}",
        models.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn single_gguf_wins_and_several_must_be_chosen_from() {
        assert_eq!(
            choose("a/b", &files(&["m.gguf", "README.md"])).expect("one"),
            Choice::Files(files(&["m.gguf"]))
        );
        let error = choose("a/b", &files(&["m-q4.gguf", "m-q8.gguf"])).expect_err("two").to_string();
        assert!(error.contains("hf:a/b:FILE") && error.contains("m-q8.gguf"), "{error}");
        let folder = choose("a/b", &files(&["config.json", "model.safetensors", "onnx/x.safetensors"]))
            .expect("folder");
        assert_eq!(folder, Choice::Folder(files(&["config.json", "model.safetensors"])));
        assert!(choose("a/b", &files(&["README.md"])).is_err());
    }

    #[test]
    fn all_parts_of_a_split_model_are_chosen_together() {
        let parts =
            files(&["q4/m-00001-of-00003.gguf", "q4/m-00002-of-00003.gguf", "q4/m-00003-of-00003.gguf"]);
        assert_eq!(choose("a/b", &parts).expect("one model"), Choice::Files(parts.clone()));
        assert_eq!(Choice::of_file(&parts[1]).expect("a part"), Choice::Files(parts));
        let single = "m-00001-of-1.gguf";
        assert_eq!(Choice::of_file(single).expect("not a part"), Choice::Files(files(&[single])));
        for bad in ["m-00004-of-00003.gguf", "m-00000-of-00000.gguf", "m-00001-of-99999.gguf"] {
            assert!(Choice::of_file(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn names_that_would_leave_the_folder_are_not_chosen() {
        assert!(choose("a/b", &files(&["../../m.gguf"])).is_err());
        assert!(choose("a/b", &files(&["/etc/m.gguf"])).is_err());
    }
}
