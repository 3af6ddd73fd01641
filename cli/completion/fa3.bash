# bash completion for fa3: commands and options come from the program's own --help.
_fa3() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} command=${COMP_WORDS[1]}
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    mapfile -t COMPREPLY < <(compgen -W "run verify quantize bench info --help --version" -- "$word")
    return
  fi
  case $before in
    --device) mapfile -t COMPREPLY < <(compgen -W "cpu cuda auto" -- "$word") && return ;;
    --layout) mapfile -t COMPREPLY < <(compgen -W "bshd bhsd" -- "$word") && return ;;
    --out-dtype) mapfile -t COMPREPLY < <(compgen -W "same fp32 fp16 bf16" -- "$word") && return ;;
    --grad-dtype) mapfile -t COMPREPLY < <(compgen -W "same fp32" -- "$word") && return ;;
    --dtype) mapfile -t COMPREPLY < <(compgen -W "fp32 fp16 bf16 e4m3" -- "$word") && return ;;
  esac
  if [[ $word == -* ]]; then
    local options
    options=$("${COMP_WORDS[0]}" "$command" --help 2>/dev/null |
      sed -n 's/^ \{2,6\}\(-., \)\?\(--[a-z0-9-]*\).*/\2/p')
    mapfile -t COMPREPLY < <(compgen -W "$options" -- "$word")
    return
  fi
  mapfile -t COMPREPLY < <(
    compgen -f -X '!*.npy' -- "$word"
    compgen -f -X '!*.safetensors' -- "$word"
    compgen -d -- "$word"
  )
  compopt -o filenames 2>/dev/null
}
complete -F _fa3 fa3
