//! The nearest valid word to a misspelt one.
//!
//! A refusal that names the word that was probably meant saves a look into the manual. The lists are short, so the
//! plain edit distance is enough.

/// The candidate that differs least from `word`, if it is near enough to be a slip of the keyboard: at most one
/// change in three letters, and at least one letter in common.
pub fn nearest<'a>(word: &str, candidates: &[&'a str]) -> Option<&'a str> {
    let changes_max = word.chars().count().max(3) / 3 + 1;
    candidates
        .iter()
        .map(|candidate| (changes_between(word, candidate), *candidate))
        .filter(|(changes, candidate)| *changes <= changes_max && *changes < candidate.chars().count())
        .min_by_key(|(changes, _)| *changes)
        .map(|(_, candidate)| candidate)
}

/// The words to put behind a refusal: the nearest candidate as a question, or else the whole list.
pub fn suggestion(word: &str, candidates: &[&str]) -> String {
    match nearest(word, candidates) {
        Some(near) => format!("did you mean `{near}`?"),
        None => format!("valid names are {}", candidates.join(", ")),
    }
}

/// Insertions, deletions, replacements and swaps of neighbours that turn one word into the other.
fn changes_between(from: &str, to: &str) -> usize {
    let from: Vec<char> = from.to_lowercase().replace('_', "-").chars().collect();
    let to: Vec<char> = to.to_lowercase().replace('_', "-").chars().collect();
    let mut rows = vec![vec![0; to.len() + 1]; from.len() + 1];
    for (i, row) in rows.iter_mut().enumerate() {
        row[0] = i;
    }
    for (j, cell) in rows[0].iter_mut().enumerate() {
        *cell = j;
    }
    for i in 1..=from.len() {
        for j in 1..=to.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(from[i - 1] != to[j - 1]);
            let mut least = replaced.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
            if i > 1 && j > 1 && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            rows[i][j] = least;
        }
    }
    rows[from.len()][to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORDS: &[&str] = &["listen", "memory", "drive", "accelerator", "admin-token-file"];

    #[test]
    fn a_slip_of_the_keyboard_is_recognised() {
        for (typed, meant) in [
            ("lisen", "listen"),
            ("memroy", "memory"),
            ("drives", "drive"),
            ("acelerator", "accelerator"),
            ("admin_token_file", "admin-token-file"),
            ("Memory", "memory"),
        ] {
            assert_eq!(nearest(typed, WORDS), Some(meant), "{typed}");
        }
    }

    #[test]
    fn a_foreign_word_gets_the_whole_list() {
        assert_eq!(nearest("kubernetes", WORDS), None);
        assert_eq!(nearest("", WORDS), None);
        assert!(suggestion("kubernetes", WORDS).contains("listen, memory"));
    }
}
