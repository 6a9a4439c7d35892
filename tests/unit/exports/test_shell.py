"""What is read of shell scripts: forms of a command, variables, and branches."""

import pytest

from amp_ray.errors import InputError
from amp_ray.exports.reading import read_program
from amp_ray.exports.shell import LineError, branches_of, words_of
from support.experiments import small_experiment

EXPERIMENT = small_experiment(
    ("device: T4", "device: A100-40"),
    ("family: gpt2", "family: llama"),
    ("global_batch_size: 8\n", "global_batch_size: 8\nruntime: megatron-core\nprecision: bf16\n"),
)
FLAGS = "--tensor-model-parallel-size $TP --pipeline-model-parallel-size 2 --micro-batch-size 1"
RUN = f"torchrun pretrain_gpt.py {FLAGS}\n"


def tp_of(text: str) -> int:
    """Return tp of a script."""
    record = read_program(text, file="run.sh", experiment=EXPERIMENT)
    assert record is not None
    tp: int = record["tp"]
    return tp


SAME = f"""\
NODES=$1
ARGS=({FLAGS.replace("$TP", "2")})
DATA=()
if [[ -z "$NODES" ]]; then
    DATA+=(
        "--mock-data"
        "--num-workers 1"
    )
else
    DATA+=("--data-path $1" "--num-workers 2" --tokenizer-model '/a b')
fi
torchrun pretrain_gpt.py "${{ARGS[@]}}" "${{DATA[@]}}"
"""


@pytest.mark.parametrize(
    "text",
    [
        f'TP=2\nsrun bash -c "python -u pretrain_gpt.py {FLAGS}"\n',
        f"TP=2\nsrun --ntasks 4 bash -lc 'cd /w && python pretrain_gpt.py {FLAGS}'\n",
        f"export TP=2\ndocker run --gpus all image \\\n  torchrun pretrain_gpt.py {FLAGS}\n",
        f'TP=2; docker run image bash -c "set -e; torchrun pretrain_gpt.py {FLAGS}"\n',
        f'TP=2\nsbatch --nodes=1 --wrap "srun python pretrain_gpt.py {FLAGS}"\n',
        f'TP=2\nsbatch --wrap="python pretrain_gpt.py {FLAGS}"\n',
        f"TP=2\napptainer exec --nv image.sif python pretrain_gpt.py {FLAGS}\n",
        f"TP=2\nmpirun -np 4 -x PATH python pretrain_gpt.py {FLAGS} 2>&1 | tee log\n",
        f'TP=2\nkubectl exec pod -- bash -c "torchrun pretrain_gpt.py {FLAGS}"\n',
        f'TP=2\nssh host "cd /w; torchrun pretrain_gpt.py {FLAGS}"\n',
        f'TP=2\nCMD="torchrun pretrain_gpt.py {FLAGS}"\neval $CMD\n',
        f'TP=2\nCMD="torchrun pretrain_gpt.py {FLAGS}"\n$CMD\n',
        f"TP=2\nsbatch <<EOF\n#!/bin/bash\nsrun python pretrain_gpt.py {FLAGS}\nEOF\necho done\n",
        f"run() {{\n  local TP=$1\n  {RUN}}}\nrun 2\n",
        f"function run {{\n  {RUN}}}\nTP=2\nrun\n",
        f"SIZE=8B\nif [ $SIZE = 7B ]; then TP=1; elif [ $SIZE == 8B ]; then TP=2; fi\n{RUN}",
        f"SIZE=8B\ncase $SIZE in\n 7B) TP=1;;\n 8B|9B)\n  TP=2\n  ;;\n *) TP=4;;\nesac\n{RUN}",
        f"if [ $BIG ]; then TP=2; else TP=2; fi\n{RUN}",
        f'TP=2\nif [ -z "$1" ]; then echo "usage: --tensor-model-parallel-size N"; exit; fi\n{RUN}',
        f"TP=2\ncommand -v nvidia-smi || exit 1\n[ -d /data ] && cd /data\n{RUN}",
        f"for TP in 2; do\n  {RUN}done\n",
        f"for host in $(cat hosts); do\n  TP=2\n  {RUN}done\n",
        f"TP=${{TP:-2}}  # 4 is slower\n{RUN}",
        f"D=2\nTP=${{TP:-$D}}\n{RUN}",
        f"D=2\nTP=${{TP:-${{D}}}}\n{RUN}",
        f"function run() (\n  TP=2\n  {RUN})\nrun\n",
        f"function run() (\n  a\n)\nTP=2\n{RUN}b() {{ c; }}\n",
        f"run() if true; then\n  {RUN}fi\nTP=2\nrun\n",
        f'H=$(srun --nodes=1 id --ip)\nTP=2\ntorchrun --host "$H:1" pretrain_gpt.py {FLAGS}\n',
        f'A=(1 2)\nTP=2\ntorchrun pretrain_gpt.py \\\n  {FLAGS} \\\n  --log ${{#A[@]}} "$@"\n',
        f"(cd /w; TP=2; {RUN})\n",
        f"TP=2\ncat <<EOF\ndon't: --tensor-model-parallel-size 4\nEOF\n{RUN}",
        f"TP=2\nTP=4 true\n{RUN}",
        f"TP=2\n(TP=4; echo $TP)\n{RUN}",
        f"TP=2\nbash -c 'TP=4; echo --x'\n{RUN}",
        f"TP=2\nf() {{ local TP=4; echo; }}\nf\n{RUN}",
        f"(TP=4; exit)\nTP=2\n{RUN}",
        f"SP=1; TP=4\n(( SP )) && TP=2\n{RUN}",
        f"N=2; TP=2\nif (( N > 2 )); then TP=4; fi\n{RUN}",
        f"for ((n = 0; n < 2; n++)); do TP=2; done\n{RUN}",
        f': "${{TP:=2}}"\n{RUN}',
        f"WORLD=$((2 * $N))\nPP=2\nTP=$((WORLD / PP))\n{RUN}".replace("$N", "2"),
        'TP=2\nARGS="--tensor-model-parallel-size $TP --pipeline-model-parallel-size 2"\n',
        "--tensor-model-parallel-size 2\n--pipeline-model-parallel-size 2\n",
        SAME,
    ],
)
def test_a_form_of_a_command_is_read(text: str) -> None:
    assert tp_of(text) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f"x=1\nif [[ $BIG == 1 ]]; then\n  TP=2\nelse\n  TP=1\nfi\n{RUN}",
            "run.sh:2: --tensor-model-parallel-size is '1' or '2', by the condition '[[ $BIG",
        ),
        (f"case $1 in\n  big) TP=2;;\n  *) TP=1;;\nesac\n{RUN}", "run.sh:1: --tensor-model-pa"),
        (f'TP=1\n[ -n "$BIG" ] && TP=2\n{RUN}', "run.sh:2: --tensor-model-parallel-size is"),
        (f"TP=1\nnvidia-smi | grep H100 && TP=2 || TP=1\n{RUN}", "--tensor-model-parallel-size is"),
        (f"TP=1\nif ! nvidia-smi; then TP=2; fi\n{RUN}", "by the condition 'nvidia-smi'"),
        (
            f"TP=1\nwhile [ $# -gt 0 ]; do\n case $1 in\n  --tp) TP=$2;;\n esac\ndone\n{RUN}",
            "run.sh:3: --tensor-model-parallel-size is '1' or '$2'",
        ),
        (
            f"TP=1\nif [ $FSDP ]; then A='--use-distributed-optimizer'; fi\nrun.py {FLAGS} $A\n",
            "--use-distributed-optimizer is missing or '', by the condition '[ $FSDP ]'",
        ),
        (f"TP=2 {RUN}", "run.sh:1: --tensor-model-parallel-size: found '$TP'; expected a count"),
        (f"TP=$((N * 2))\n{RUN}", "found '$((N * 2))'; expected a count"),
        (f"TP=1\n(( BIG )) && TP=2\n{RUN}", "is '1' or '2', by the condition '(( BIG ))'"),
        (f"TP=2\n((TP++))\n{RUN}", "--tensor-model-parallel-size: found '$((TP++))'"),
        (RUN, "run.sh:1: --tensor-model-parallel-size: found '$TP'; expected a count"),
        (
            f"for TP in 1 2; do\n{RUN}done\n",
            "--tensor-model-parallel-size is '1' and '2': keep one",
        ),
        (f"if true; then\n{RUN}", "run.sh:1: cannot be read as a script: no fi"),
        (f'TP=2\nbash -c "echo \'{RUN}"\n', "run.sh:2: cannot be read as a script: No closing quo"),
        (
            f'TP=2\na "$(torchrun pretrain_gpt.py {FLAGS})"\n',
            "run.sh:2: --tensor-model-parallel-size stands in no command that is read",
        ),
        ("".join(f"[ $A{n} ] && B=1\n" for n in range(120)) + RUN, "more than 100 branches"),
    ],
)
def test_a_flag_that_depends_on_the_environment_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        tp_of(text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a 'b $X' \"c $X\" d\\ e", ["a", "b $X", "c $X", "d e"]),
        ("X='1 2'; a $X \"$X\" $Y", ["a", "1", "2", "1 2", "$Y"]),
        ("a <in >out 2>&1 <<<text b # c", ["a", "b"]),
        ("X=$(a --b $(c))\nd $X:1 `e --f`", ["d", "$(a --b $(c)):1", "`e --f`"]),
        ('a "`b "c d"`" e', ["a", '`b "c d"`', "e"]),
        ("X=$(date '+%s)'); a \"$X\" `b c`", ["a", "$(date '+%s)')", "`b c`"]),
        (
            "A=(1 # one\n '2 3')\na ${A[@]} \"${A[@]}\" ${A[*]}",
            ["a", "1", "2", "3", "1", "2 3", "1", "2", "3"],
        ),
        ('A+="x"\nA+=y\na$A', ["axy"]),
        ("a() (b); a", ["b"]),
        ("a;b&c|d&&e||f", ["a", "b", "c", "d", "e"]),
    ],
)
def test_words_are_those_of_a_shell(text: str, words: list[str]) -> None:
    assert words_of(text) == words


@pytest.mark.parametrize(
    "text", ["$(" * 9999, "${" * 9999, "(" * 9999, "a() { a; }\na", "if " * 9999]
)
def test_what_has_no_end_is_refused(text: str) -> None:
    with pytest.raises(LineError):
        branches_of(text)


def test_calls_that_double_are_refused() -> None:
    doubled = "".join(f"f{n + 1}() {{ f{n}; f{n}; }}\n" for n in range(28))
    branches = "".join(f"[ $A{n} ] && B=1\n" for n in range(90))
    for text in (f"f0() {{ a; }}\n{doubled}f28\n", f"f0() {{ a; }}\n{branches}{doubled}f11\n"):
        with pytest.raises(LineError, match="more than 1048576 characters"):
            branches_of(text)
