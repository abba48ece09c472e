"""What those need who come after us: the list of programs, the Hub, the leaderboard, .github."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from huggingface_hub import DatasetCard, ModelCard

from conftest import CPU, PLAY, ROOT, lines, records, script, shell, succeed, train, weights

MANUAL = Path(ROOT, "tests/experiments/MANUAL.md").read_text()
RESULTS = Path(ROOT, "tests/experiments/RESULTS.md").read_text()


def test_the_manual_lists_every_program_once():
    section = MANUAL.partition("## What is where\n")[2].partition("\n## ")[0]
    cells = [row.split("|")[2] for row in section.splitlines() if row.startswith("|")]
    listed = re.findall(r"[\w.]+\.(?:py|sh|html)\b", " ".join(cells))
    programs = [path.name for path in Path(ROOT, "tests/experiments").iterdir()
                if path.suffix in (".py", ".sh", ".html")]
    assert len(programs) > 20
    assert [name for name in programs if listed.count(name) != 1] == []


# --- the Hub --------------------------------------------------------------------------------------

HF = f"""#!{sys.executable}
import os, shutil
from types import SimpleNamespace
from huggingface_hub import HfApi
from huggingface_hub.cli.hf import main
from huggingface_hub.utils import filter_repo_objects

def upload_folder(self, *, repo_id, folder_path, path_in_repo, allow_patterns, ignore_patterns,
                  **_):
    files = [os.path.relpath(os.path.join(d, name), folder_path)
             for d, _, names in os.walk(folder_path) for name in names]
    for file in filter_repo_objects(files, allow_patterns=allow_patterns,
                                    ignore_patterns=ignore_patterns):
        to = os.path.normpath(os.path.join("hub", repo_id, path_in_repo, file))
        os.makedirs(os.path.dirname(to), exist_ok=True)
        shutil.copy(os.path.join(folder_path, file), to)
    return SimpleNamespace(commit_url="", oid="")
HfApi.upload_folder = upload_folder
HfApi.create_repo = lambda self, repo_id, **_: SimpleNamespace(repo_id=repo_id, url="")
main()
"""  # the real `hf`, with the folder hub/ as the Hub


@pytest.mark.full
def test_models_and_records_come_back_from_the_hub(ranked, tasks, tiny_dir, tmp_path):
    """By MANUAL's commands: a model samples the same, records are the same, cards are read."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "tests").symlink_to(f"{ROOT}/tests")
    for name in ("train.jsonl", "trained.jsonl"):
        (tmp_path / "runs" / name).write_text(lines(ranked))
    sweet = tmp_path / "runs" / "sweet"
    train(ranked, "train_policy.py", "--model", tiny_dir, "--batch_size", 24, "--lr", 1e-3,
          "--out", sweet)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "hf").write_text(HF)
    (tmp_path / "bin" / "hf").chmod(0o755)
    block = re.search(r"<!-- hub -->\n```bash\n(.*?)```", MANUAL, re.S)[1]
    path = [f"{tmp_path}/bin", os.path.dirname(sys.executable), os.environ["PATH"]]
    env = {**CPU, "PATH": os.pathsep.join(path),
           "HF_HOME": str(tmp_path / "home")}
    subprocess.run(["bash", "-euc", block], cwd=tmp_path, env=env, check=True, timeout=180)
    model, data = tmp_path / "hub" / "ME" / "pay-sweet", tmp_path / "hub" / "ME" / "pay-episodes"
    assert all(p.equal(weights(model)[name]) for name, p in weights(sweet).items())
    ours, theirs = (records(succeed("collect.py", "--model", path, *PLAY, stdin=tasks).stdout)
                    for path in (sweet, model))
    assert [r["dialogue_history"] for r in ours] == [r["dialogue_history"] for r in theirs] != []
    card = ModelCard.load(model / "README.md")
    assert card.data.library_name == "transformers" and str(tiny_dir) in card.text
    card = DatasetCard.load(data / "README.md")
    assert card.data.license and "toy's human" in card.text
    files = [config["data_files"] for config in card.data.configs]
    assert records((data / files[0]).read_text()) == ranked and len(files) == 1


# --- the leaderboard ------------------------------------------------------------------------------

def cells_of(row):
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def test_a_row_of_the_leaderboard(tmp_path):
    """Its numbers stand in the table's columns."""
    table = RESULTS.partition("<!-- leaderboard -->\n")[2].partition("\n\n")[0]
    head, _, *rows = table.splitlines()
    assert rows and all(len(cells_of(row)) == len(cells_of(head)) for row in rows)
    results = [{"system": name, "version": "abc1234-dirty, python 3.11", "success": share,
                "success_95": [share - 0.01, share + 0.01], "files": ["x"] * 5, "tasks": 400,
                "episodes": 2000}
               for name, share in (("base", 0.2), ("rft", 0.5), ("sweet", 0.65), ("sweet2", 0.75))]
    row = succeed("tests/experiments/leaderboard.py", stdin=results).stdout
    filled = dict(zip(cells_of(head), cells_of(row), strict=True))
    assert filled["success %, second round"] == "75.0 [74.0, 76.0]"
    assert filled["first round"] == "65.0 [64.0, 66.0]" and filled["RFT"] == "50.0 [49.0, 51.0]"
    assert filled["before training"] == "20.0 [19.0, 21.0]" and filled["commit"] == "abc1234-dirty"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", filled["date"])
    assert filled["what changed"] == "what you changed"
    for less in {"files": ["x"]}, {"tasks": 40}, {"episodes": 1999}:  # a rehearsal, failed episodes
        few = [*results[:3], {**results[3], **less}]
        row = succeed("tests/experiments/leaderboard.py", stdin=few).stdout
        assert cells_of(row)[-1].startswith("NO ROW: ")
    done = script("tests/experiments/leaderboard.py", stdin=results[:2])
    assert done.returncode == 1 and "sweet2, sweet" in done.stderr and not done.stdout


# --- .github --------------------------------------------------------------------------------------

def test_the_workflow_runs_what_a_contributor_runs():
    workflow = yaml.safe_load(Path(ROOT, ".github/workflows/test.yml").read_text())
    commands = [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step]
    assert commands == [".ci/run"] and os.access(f"{ROOT}/.ci/run", os.X_OK)
    assert workflow[True].keys() == {"push", "pull_request"}  # YAML reads the key `on` as true


def test_commands_of_the_issue_templates_and_files_that_contributing_names():
    bug = Path(ROOT, ".github/ISSUE_TEMPLATE/bug.md").read_text()
    said = shell(re.search(r"`(python -c .*?)`", bug)[1]).stdout
    assert "python 3" in said and "torch" in said and "transformers" in said
    text = Path(ROOT, ".github/CONTRIBUTING.md").read_text()
    paths = re.findall(r"`((?:tests/|\.ci/)[\w/.]+)`", text)
    paths += re.findall(r"(?:bash|-q) (tests/[\w/.]+\.\w+)", text)
    assert len(paths) >= 5 and all(os.path.exists(f"{ROOT}/{path}") for path in paths)


def test_requirements_are_exact_and_ci_tests_other_versions():
    """One version of vLLM everywhere, and of each package that is installed. CI also runs those of
    transformers that requirements.txt names."""
    texts = [Path(ROOT, name).read_text() for name in (
        "requirements.txt", "README.md", "tests/experiments/MANUAL.md", ".ci/run")]
    pinned = [line for line in texts[0].splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w-]+==[\d.]+( +#.*)?", line) for line in pinned)
    named = next(line for line in pinned if line.startswith("transformers"))
    run = re.search(r"versions=\((.*?)\)", texts[3])[1].split()
    assert run and re.findall(r"\d+\.\d+\.\d+", named)[1:] == run
    assert len({v for text in texts for v in re.findall(r"vllm(?:-cpu)?==([\d.]+\d)", text)}) == 1
