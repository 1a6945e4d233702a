#!/bin/sh
# nvcc puts the source's real path (hashed) and its temporary files' names, with process ids, into symbol names. CMake runs nvcc
# through this, so that two builds of one engine key, in different folders, are the same to the byte: -objtemp names the temporary files
# after the object, and the path that is hashed is made relative to LLMCTL_SOURCE. Seen with nvcc 13.0; -frandom-seed does not help.
source=
for word do
    case $word in *.cu) source=$word ;; esac
done
case $source in
    '') exec "$@" ;;
    *) exec "$@" -objtemp "-Xcudafe=--orig_src_path_name=./${source#"$LLMCTL_SOURCE"/}" ;;
esac
